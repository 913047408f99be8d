#include "src/loss/allocation_limit.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

namespace weft::loss {
namespace {

thread_local AllocationLimit* current = nullptr;

class LimitingAllocator final : public c10::Allocator {
 public:
  explicit LimitingAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (current != nullptr) current->Take(bytes);
    return inner_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return inner_->raw_deleter();
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* const inner_;
};

}  // namespace

void AllocationLimit::Install() {
  c10::Allocator* const present = c10::GetCPUAllocator();
  if (dynamic_cast<LimitingAllocator*>(present) != nullptr) return;
  // A lower priority would leave an allocator of this one in place.
  c10::SetCPUAllocator(new LimitingAllocator(present), /*priority=*/255);
}

AllocationLimit::AllocationLimit(int64_t bytes) : bytes_(bytes) {
  current = this;
}

AllocationLimit::~AllocationLimit() { current = nullptr; }

void AllocationLimit::Take(size_t bytes) {
  TORCH_CHECK(bytes <= static_cast<uint64_t>(bytes_ - taken_),
              "makes the graph allocate more than ", bytes_,
              " bytes for this datum, the limit for its targets");
  taken_ += static_cast<int64_t>(bytes);
}

}  // namespace weft::loss
