// Huge pages for large buffers that are filled once. With pages of 2 MiB the
// kernel needs a fraction of the time to clear and map them.
#ifndef WEFT_SRC_BASE_HUGE_PAGES_H_
#define WEFT_SRC_BASE_HUGE_PAGES_H_

#include <cstddef>

#include "absl/types/span.h"

namespace weft {

// Asks for huge pages where the buffer covers whole ones. Call it before the
// memory is first touched. It does nothing on a kernel without huge pages.
void PreferHugePages(absl::Span<std::byte> buffer);

}  // namespace weft

#endif  // WEFT_SRC_BASE_HUGE_PAGES_H_
