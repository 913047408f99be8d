// The slot of the state of one sequence, in models with recurrent layers. A
// state is a value at one position, so unlike pages no two sequences share one.
//
// Slots have the allocator of pages (page_allocator.h), whose pages they are.
// Threads: not thread-safe. One thread uses all slots of an allocator.
#ifndef WEFT_SRC_DISPATCH_STATE_SLOT_H_
#define WEFT_SRC_DISPATCH_STATE_SLOT_H_

#include <optional>
#include <utility>

#include "src/dispatch/page_allocator.h"
#include "src/request/cache_copy.h"

namespace weft::dispatch {

// A user of a slot, or none. The destructor releases the slot. `allocator`
// outlives the object.
class StateSlot {
 public:
  StateSlot() = default;
  // Becomes a user of a slot that is in use or idle.
  StateSlot(PageAllocator* allocator, StateId id)
      : allocator_(allocator), id_(id) {
    allocator->Share(id);
  }
  ~StateSlot() {
    if (id_.has_value()) allocator_->Release(*id_);
  }
  StateSlot(StateSlot&& other) noexcept
      : allocator_(other.allocator_),
        id_(std::exchange(other.id_, std::nullopt)) {}
  StateSlot& operator=(StateSlot&& other) noexcept {
    std::swap(allocator_, other.allocator_);
    std::swap(id_, other.id_);
    return *this;
  }
  StateSlot(const StateSlot&) = delete;
  StateSlot& operator=(const StateSlot&) = delete;

  // Returns the user of a free slot; of none if no slot is free.
  static StateSlot Allocate(PageAllocator* allocator) {
    StateSlot slot;
    slot.allocator_ = allocator;
    slot.id_ = allocator->Allocate();
    return slot;
  }

  const std::optional<StateId>& id() const { return id_; }

 private:
  PageAllocator* allocator_ = nullptr;
  std::optional<StateId> id_;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_STATE_SLOT_H_
