// The order in which the prompts and samples of the decode loop get slots and
// pages.
//
// In one tenant the oldest is first. Between tenants the one is first before
// which its tenant has the smallest part of the loop: the parts of the tenant's
// older prompts and samples, divided by the tenant's weight. The part of one is
// its part of all slots or of all pages, whichever is larger. So the first
// prompt or sample of a tenant comes before the second ones of all others. The
// first ones of two tenants take turns: that of a tenant whose first one has
// ended goes behind the others. Until it ends, nothing passes the one that is
// first of all, so the loop always makes progress.
// Threads: not thread-safe.
#ifndef WEFT_SRC_DISPATCH_DECODE_ORDER_H_
#define WEFT_SRC_DISPATCH_DECODE_ORDER_H_

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace weft::dispatch {

class DecodeOrder {
 public:
  // A prompt or a sample. Later ones have higher ages.
  struct Member {
    std::string tenant;
    std::pair<uint64_t, int> age;
    int64_t slots = 0;
    int64_t pages = 0;
  };
  // The smallest place is first. No two members have equal places.
  struct Place {
    double share = 0;    // The tenant's part before this member, by weight.
    uint64_t since = 0;  // Breaks ties between tenants.
    size_t index = 0;    // Breaks ties in one tenant: the member's index.
    double end = 0;      // The tenant's part with this member, by weight.
    friend auto operator<=>(const Place&, const Place&) = default;
  };

  // The loop has `slots` slots and `pages` pages. `weights` maps tenants to
  // weights >= 1. Other tenants have weight 1.
  DecodeOrder(int64_t slots, int64_t pages,
              std::map<std::string, int64_t> weights)
      : slots_(slots), pages_(pages), weights_(std::move(weights)) {}

  // Returns the members' places. REQUIRES: the members are those of the
  // previous call, except that some have left and others have come.
  std::vector<Place> Places(const std::vector<Member>& members);

 private:
  // The first member of a tenant.
  struct Head {
    std::pair<uint64_t, int> age;
    uint64_t since = 0;
  };

  const int64_t slots_;
  const int64_t pages_;
  const std::map<std::string, int64_t> weights_;
  std::map<std::string, Head> heads_;
  uint64_t num_heads_ = 0;  // Counts all heads that there have been.
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_DECODE_ORDER_H_
