// Counts the bytes of the stored replies of all adapters and finds the reply to
// drop: the oldest one of the tenant with the most bytes. So no tenant below
// its share loses a reply. The adapters' replay tables hold the replies
// themselves. Threads: not thread-safe.
#ifndef WEFT_SRC_DISPATCH_STORED_REPLIES_H_
#define WEFT_SRC_DISPATCH_STORED_REPLIES_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "src/request/adapter_key.h"

namespace weft::dispatch {

class StoredReplies {
 public:
  struct Reply {
    std::string tenant;
    AdapterKey adapter = AdapterKey::kBaseModel;
    uint64_t step = 0;
    int64_t bytes = 0;
  };

  explicit StoredReplies(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // Adds a reply and returns its receipt, which names the reply.
  uint64_t Add(const Reply& reply);
  void Remove(uint64_t receipt);

  // If the replies exceed the constructor's `max_bytes`, removes and returns
  // the oldest reply of the tenant with the most bytes; otherwise returns none.
  // The latest reply always stays, because its caller may not have received it
  // yet.
  std::optional<Reply> TakeExcess();

  [[nodiscard]] int64_t bytes() const { return bytes_; }

 private:
  struct Account {
    std::map<uint64_t, Reply> by_age;  // Later replies have higher receipts.
    int64_t bytes = 0;
  };
  using Accounts = std::map<std::string, Account>;

  Reply Take(Accounts::iterator account, uint64_t receipt);

  const int64_t max_bytes_;
  Accounts accounts_;                          // Tenants that have replies.
  std::map<uint64_t, std::string> tenant_of_;  // By receipt.
  uint64_t next_receipt_ = 1;
  int64_t bytes_ = 0;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_STORED_REPLIES_H_
