// Start-time fair queueing on two levels: tenants share in proportion to their
// weights, and the adapters of one tenant share equally.
//
// A member (a tenant, or an adapter of one tenant) has a virtual start time.
// The active member with the earliest start time is served next. Its start time
// then grows by tokens / weight. Each level has a clock: the latest start time
// that a member had when it was served. When an idle member becomes active, its
// start time is raised to at least the clock. So idleness earns no credit.
// Threads: not thread-safe.
#ifndef WEFT_SRC_DISPATCH_FAIR_SHARES_H_
#define WEFT_SRC_DISPATCH_FAIR_SHARES_H_

#include <compare>
#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "absl/time/time.h"
#include "src/request/adapter_key.h"

namespace weft::dispatch {

class FairShares {
 public:
  // A member's place in line; the smallest place is first. No two active
  // members of a level have equal places.
  struct Place {
    int64_t start = 0;
    uint64_t since = 0;  // Breaks ties: the member active for longest is first.
    friend auto operator<=>(const Place&, const Place&) = default;
  };
  struct Turn {
    Place tenant;   // Place among the tenants.
    Place adapter;  // Place among the tenant's adapters.
    friend auto operator<=>(const Turn&, const Turn&) = default;
  };

  // `weights` maps tenants to weights >= 1. Other tenants have weight 1.
  explicit FairShares(std::map<std::string, int64_t> weights);

  // Adds an adapter. The other methods require that the adapter was added.
  void Add(AdapterKey adapter, const std::string& tenant);
  void Remove(AdapterKey adapter);

  // Sets whether the adapter has work that could start or is on the device.
  void SetActive(AdapterKey adapter, bool active);
  // Charges the adapter for work that it starts.
  void Charge(AdapterKey adapter, int64_t tokens);
  // Takes back a Charge of `tokens` and makes the adapter active, because its
  // work goes back to the queue.
  void Refund(AdapterKey adapter, int64_t tokens);

  // Returns the turn of an adapter. REQUIRES: the adapter is active.
  Turn TurnOf(AdapterKey adapter) const;
  const std::string& TenantOf(AdapterKey adapter) const;

 private:
  // One level: all tenants, or the adapters of one tenant. The members of a
  // level share one clock.
  struct Level {
    int64_t clock = 0;
    uint64_t entries = 0;

    void Enter(Place& place);
    void Serve(Place& place, int64_t cost);
  };
  struct Tenant {
    int64_t weight = 1;
    Place place;
    Level adapters;
    int num_adapters = 0;
    int num_active = 0;
  };
  struct Adapter {
    std::map<std::string, Tenant>::iterator tenant;
    Place place;
    bool active = false;
  };

  const std::map<std::string, int64_t> weights_;
  Level level_;
  // Tenants that have adapters, and those that have none any more but whose
  // start time is later than the clock: without it they would come back ahead
  // of the others.
  std::map<std::string, Tenant> tenants_;
  std::set<std::string> left_;  // Those without adapters.
  std::map<AdapterKey, Adapter> adapters_;
};

// Shares device time between two kinds of work: training and decoding. Each
// kind has a virtual time, which grows by the device time that the kind used,
// divided by its share. If both kinds have work, the kind with less virtual
// time goes first. When an idle kind gets work, its virtual time is raised to
// at least the virtual time at which the latest turn started (start-time fair
// queueing). So idleness earns no credit, and work that arrives during a
// micro-batch does not wait for a second one. Threads: not thread-safe.
class DeviceShare {
 public:
  // `sampling_share`, in (0, 1), is sampling's share of device time while both
  // kinds have work.
  explicit DeviceShare(double sampling_share);

  // Returns whether decoding goes first. REQUIRES: at least one kind has work.
  bool ChooseDecode(bool can_train, bool can_decode);

  // Notes that neither kind has work.
  void NoteIdle();

  void AddTraining(absl::Duration elapsed);
  void AddDecoding(absl::Duration elapsed);

 private:
  struct Kind {
    double share = 0;
    double virtual_seconds = 0;
    bool has_work = false;
  };

  void Wake(Kind& kind, bool has_work);

  Kind training_;
  Kind decoding_;
  double turn_start_ = 0;  // The virtual time at which the latest turn started.
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_FAIR_SHARES_H_
