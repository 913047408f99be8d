// A queue in which owners take turns.
#ifndef WEFT_SERVER_TINKER_OWNER_TURNS_H_
#define WEFT_SERVER_TINKER_OWNER_TURNS_H_

#include <cstddef>
#include <deque>
#include <map>
#include <string>
#include <utility>

namespace weft::tinker {

// Threads: not thread-safe.
template <typename Item>
class OwnerTurns {
 public:
  void Add(const std::string& owner, Item item) {
    waiting_[owner].push_back(std::move(item));
  }

  [[nodiscard]] bool empty() const { return waiting_.empty(); }
  // Returns how many items of the owner wait.
  [[nodiscard]] size_t CountOf(const std::string& owner) const {
    const auto own = waiting_.find(owner);
    return own == waiting_.end() ? 0 : own->second.size();
  }

  // Removes and returns the first item of the owner whose turn it is.
  // REQUIRES: !empty().
  [[nodiscard]] Item Take() {
    auto turn = waiting_.upper_bound(last_);
    if (turn == waiting_.end()) turn = waiting_.begin();
    last_ = turn->first;
    Item item = std::move(turn->second.front());
    turn->second.pop_front();
    if (turn->second.empty()) waiting_.erase(turn);
    return item;
  }

 private:
  // The items by owner. An owner without any has no entry.
  std::map<std::string, std::deque<Item>> waiting_;
  std::string last_;  // The owner whose turn was last.
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_OWNER_TURNS_H_
