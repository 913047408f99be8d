#include "src/base/huge_pages.h"

#include <sys/mman.h>

#include <cstdint>

namespace weft {

void PreferHugePages(absl::Span<std::byte> buffer) {
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const auto begin = reinterpret_cast<uintptr_t>(buffer.data());
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (begin + buffer.size()) / kHugePage * kHugePage;
  if (first >= last) return;
  (void)madvise(buffer.data() + (first - begin), last - first, MADV_HUGEPAGE);
}

}  // namespace weft
