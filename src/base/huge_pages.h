// Large buffers that are filled once: with pages of 2 MiB the kernel spends a
// fraction of the time on clearing and mapping them.
#ifndef WEFT_SRC_BASE_HUGE_PAGES_H_
#define WEFT_SRC_BASE_HUGE_PAGES_H_

#include <cstddef>

#include "absl/types/span.h"

namespace weft {

// Asks for huge pages where the buffer covers whole ones. Best called before
// the memory is first touched; a kernel that has none is as good as before.
void PreferHugePages(absl::Span<std::byte> buffer);

}  // namespace weft

#endif  // WEFT_SRC_BASE_HUGE_PAGES_H_
