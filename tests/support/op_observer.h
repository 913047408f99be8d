// Records the LibTorch operators that a piece of code runs, for tests that
// forbid some of them.
#ifndef WEFT_TESTS_SUPPORT_OP_OBSERVER_H_
#define WEFT_TESTS_SUPPORT_OP_OBSERVER_H_

#include <ATen/record_function.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace weft::testing {

// Records the operators that its thread calls while the object exists, in
// order, including those that other operators call. A name has the form
// "aten::mm". A thread has one observer at a time.
class OpObserver {
 public:
  OpObserver()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(&Record).scopes(
                {at::RecordScope::FUNCTION}))) {
    Current() = this;
  }
  ~OpObserver() {
    at::removeCallback(handle_);
    Current() = nullptr;
  }
  OpObserver(const OpObserver&) = delete;
  OpObserver& operator=(const OpObserver&) = delete;

  const std::vector<std::string>& ops() const { return ops_; }

  // Returns the operators that give the host a number or a size from a device.
  // The host waits for these.
  std::vector<std::string> HostReads() const {
    static const std::set<std::string> readers = {"aten::_local_scalar_dense",
                                                  "aten::_unique",
                                                  "aten::_unique2",
                                                  "aten::allclose",
                                                  "aten::argwhere",
                                                  "aten::bincount",
                                                  "aten::equal",
                                                  "aten::is_nonzero",
                                                  "aten::item",
                                                  "aten::masked_select",
                                                  "aten::nonzero",
                                                  "aten::repeat_interleave",
                                                  "aten::unique_consecutive",
                                                  "aten::unique_dim"};
    std::vector<std::string> reads;
    std::ranges::copy_if(
        ops_, std::back_inserter(reads),
        [](const std::string& op) { return readers.contains(op); });
    return reads;
  }

 private:
  static OpObserver*& Current() {
    static thread_local OpObserver* current = nullptr;
    return current;
  }

  static std::unique_ptr<at::ObserverContext> Record(
      const at::RecordFunction& function) {
    Current()->ops_.emplace_back(function.name());
    return nullptr;
  }

  at::CallbackHandle handle_;
  std::vector<std::string> ops_;
};

}  // namespace weft::testing

#endif  // WEFT_TESTS_SUPPORT_OP_OBSERVER_H_
