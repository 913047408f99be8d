#include "src/dispatch/fair_shares.h"

#include <algorithm>
#include <utility>

namespace weft::dispatch {
namespace {

// The virtual time of one token at weight 1. With this value, the cost of one
// token at weight 1000 is rounded by less than 1 %, and 10^14 tokens do not
// overflow.
constexpr int64_t kTimePerToken = int64_t{1} << 16;

int64_t Cost(int64_t tokens, int64_t weight) {
  return tokens * kTimePerToken / weight;
}

}  // namespace

FairShares::FairShares(std::map<std::string, int64_t> weights)
    : weights_(std::move(weights)) {}

void FairShares::Level::Enter(Place& place) {
  place.start = std::max(place.start, clock);
  place.since = ++entries;
}

void FairShares::Level::Serve(Place& place, int64_t cost) {
  clock = std::max(clock, place.start);
  place.start += cost;
}

void FairShares::Add(AdapterKey adapter, const std::string& tenant) {
  const auto [it, is_new] = tenants_.try_emplace(tenant);
  left_.erase(tenant);
  if (is_new) {
    std::erase_if(left_, [this](const std::string& name) {
      const auto gone = tenants_.find(name);
      if (gone->second.place.start > level_.clock) return false;
      tenants_.erase(gone);
      return true;
    });
    const auto weight = weights_.find(tenant);
    if (weight != weights_.end()) it->second.weight = weight->second;
  }
  const bool added =
      adapters_.try_emplace(adapter, Adapter{.tenant = it}).second;
  if (added) ++it->second.num_adapters;
}

void FairShares::Remove(AdapterKey adapter) {
  SetActive(adapter, false);
  const auto it = adapters_.find(adapter);
  const auto tenant = it->second.tenant;
  adapters_.erase(it);
  if (--tenant->second.num_adapters == 0) left_.insert(tenant->first);
}

void FairShares::SetActive(AdapterKey adapter, bool active) {
  Adapter& flow = adapters_.at(adapter);
  if (flow.active == active) return;
  flow.active = active;
  Tenant& tenant = flow.tenant->second;
  tenant.num_active += active ? 1 : -1;
  if (!active) return;
  tenant.adapters.Enter(flow.place);
  if (tenant.num_active == 1) level_.Enter(tenant.place);
}

void FairShares::Charge(AdapterKey adapter, int64_t tokens) {
  Adapter& flow = adapters_.at(adapter);
  Tenant& tenant = flow.tenant->second;
  tenant.adapters.Serve(flow.place, Cost(tokens, 1));
  level_.Serve(tenant.place, Cost(tokens, tenant.weight));
}

void FairShares::Refund(AdapterKey adapter, int64_t tokens) {
  Adapter& flow = adapters_.at(adapter);
  Tenant& tenant = flow.tenant->second;
  flow.place.start -= Cost(tokens, 1);
  tenant.place.start -= Cost(tokens, tenant.weight);
  // SetActive would raise the start time to the clock, as after idleness. But
  // the adapter was not idle: its work went back to the queue.
  if (!std::exchange(flow.active, true)) ++tenant.num_active;
}

FairShares::Turn FairShares::TurnOf(AdapterKey adapter) const {
  const Adapter& flow = adapters_.at(adapter);
  return {.tenant = flow.tenant->second.place, .adapter = flow.place};
}

const std::string& FairShares::TenantOf(AdapterKey adapter) const {
  return adapters_.at(adapter).tenant->first;
}

DeviceShare::DeviceShare(double sampling_share)
    : training_{.share = 1 - sampling_share},
      decoding_{.share = sampling_share} {}

bool DeviceShare::ChooseDecode(bool can_train, bool can_decode) {
  Wake(training_, can_train);
  Wake(decoding_, can_decode);
  const bool decodes =
      can_decode &&
      (!can_train || decoding_.virtual_seconds < training_.virtual_seconds);
  turn_start_ = (decodes ? decoding_ : training_).virtual_seconds;
  return decodes;
}

void DeviceShare::NoteIdle() {
  turn_start_ = std::max(training_.virtual_seconds, decoding_.virtual_seconds);
  training_.has_work = decoding_.has_work = false;
}

void DeviceShare::AddTraining(absl::Duration elapsed) {
  training_.virtual_seconds += absl::ToDoubleSeconds(elapsed) / training_.share;
}

void DeviceShare::AddDecoding(absl::Duration elapsed) {
  decoding_.virtual_seconds += absl::ToDoubleSeconds(elapsed) / decoding_.share;
}

void DeviceShare::Wake(Kind& kind, bool has_work) {
  if (has_work && !kind.has_work) {
    kind.virtual_seconds = std::max(kind.virtual_seconds, turn_start_);
  }
  kind.has_work = has_work;
}

}  // namespace weft::dispatch
