#include "src/dispatch/decode_order.h"

#include <algorithm>

namespace weft::dispatch {

std::vector<DecodeOrder::Place> DecodeOrder::Places(
    const std::vector<Member>& members) {
  struct Tenant {
    double share = 0;
    double weight = 1;
    uint64_t since = 0;
  };
  std::map<std::string, Tenant> tenants;
  std::map<std::string, Head> heads;
  std::vector<Place> places;
  for (size_t i = 0; i < members.size(); ++i) {
    const Member& member = members[i];
    const auto [it, is_head] = tenants.try_emplace(member.tenant);
    Tenant& tenant = it->second;
    if (is_head) {
      const auto weight = weights_.find(member.tenant);
      if (weight != weights_.end()) {
        tenant.weight = static_cast<double>(weight->second);
      }
      const auto before = heads_.find(member.tenant);
      const bool stays = before != heads_.end() &&
                         before->second.age.first == member.age.first;
      tenant.since = stays ? before->second.since : ++num_heads_;
      heads[member.tenant] = {.age = member.age, .since = tenant.since};
    }
    const double part = std::max(
        static_cast<double>(member.slots) / static_cast<double>(slots_),
        static_cast<double>(member.pages) / static_cast<double>(pages_));
    const double share = tenant.share;
    tenant.share += part / tenant.weight;
    places.push_back({.share = share,
                      .since = tenant.since,
                      .index = i,
                      .end = tenant.share});
  }
  heads_ = std::move(heads);
  return places;
}

}  // namespace weft::dispatch
