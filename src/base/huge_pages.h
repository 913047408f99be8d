// Requests huge pages for large buffers that are filled once. The kernel clears
// and maps pages of 2 MiB much faster than pages of 4 KiB.
#ifndef WEFT_SRC_BASE_HUGE_PAGES_H_
#define WEFT_SRC_BASE_HUGE_PAGES_H_

#include <cstddef>

#include "absl/types/span.h"

namespace weft {

// Asks the kernel for huge pages in all aligned blocks of 2 MiB inside
// `buffer`. Call it before the memory is first touched. The call has no effect
// on a kernel without huge pages.
void PreferHugePages(absl::Span<std::byte> buffer);

}  // namespace weft

#endif  // WEFT_SRC_BASE_HUGE_PAGES_H_
