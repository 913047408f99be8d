#include "client/route.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "src/base/status_macros.h"

namespace weft::client {
namespace {

// More answers in a row contradict each other: their servers have yet to learn
// who is the owner now.
constexpr int kMaxHops = 3;

std::vector<std::string> AddressesIn(const std::string& target) {
  // gRPC's own forms of an address may have commas.
  for (const char* const scheme : {"unix:", "unix-abstract:", "dns:", "ipv4:",
                                   "ipv6:", "vsock:", "xds:"}) {
    if (absl::StartsWith(target, scheme)) return {target};
  }
  std::vector<std::string> addresses;
  for (const absl::string_view one : absl::StrSplit(target, ',')) {
    addresses.emplace_back(absl::StripAsciiWhitespace(one));
  }
  return addresses;
}

// Returns whether a server may give this address, HOST:PORT, as the owner's.
bool NamesAServer(const std::string& address) {
  const size_t colon = address.rfind(':');
  uint32_t port = 0;
  return colon != std::string::npos && colon > 0 &&
         address.find_first_of(",/ ") == std::string::npos &&
         absl::SimpleAtoi(address.substr(colon + 1), &port) && port > 0 &&
         port <= 65535;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Route>> Route::Create(const std::string& target,
                                                     const Security& security) {
  // make_shared cannot call the private constructor.
  std::shared_ptr<Route> route(new Route(AddressesIn(target), security));
  for (const std::string& address : route->addresses_) {
    WEFT_RETURN_IF_ERROR(route->Open(address));
  }
  return route;
}

absl::Status Route::Open(const std::string& address) {
  absl::MutexLock lock(&mu_);
  if (connections_.contains(address)) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(auto channel, OpenChannel(address, security_));
  connections_[address] = std::make_shared<Connection>(std::move(channel));
  return absl::OkStatus();
}

absl::Status Route::OpenNamed(const std::string& asked,
                              const std::string& named) {
  if (!NamesAServer(named)) {
    return absl::FailedPreconditionError(absl::StrCat(
        asked, " names no owner's address (HOST:PORT): '", named, "'"));
  }
  if (const absl::Status opened = Open(named); !opened.ok()) {
    return absl::FailedPreconditionError(absl::StrCat(
        asked, " names the owner '", named, "': ", opened.message()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Route>> Route::Other(const std::string& asked,
                                                    const std::string& named) {
  WEFT_RETURN_IF_ERROR(OpenNamed(asked, named));
  std::shared_ptr<Route> other(new Route({named}, security_));
  absl::MutexLock lock(&other->mu_);
  other->connections_[named] = ConnectionTo(named);
  return other;
}

const std::string& Route::Target(const std::string& adapter_id) const {
  const auto place = places_.find(adapter_id);
  if (place != places_.end()) return place->second->second;
  return owner_.empty() ? addresses_[place_] : owner_;
}

std::string Route::target(const std::string& adapter_id) const {
  absl::MutexLock lock(&mu_);
  return Target(adapter_id);
}

std::shared_ptr<Connection> Route::ConnectionTo(const std::string& target) {
  absl::MutexLock lock(&mu_);
  return connections_.at(target);
}

absl::Status Route::Follow(const std::string& asked, const std::string& owner,
                           const std::string& adapter_id, bool alone) {
  WEFT_RETURN_IF_ERROR(OpenNamed(asked, owner));
  absl::MutexLock lock(&mu_);
  // Another call may have learnt more since this one was sent.
  const bool all_follow = !alone && Target() == asked;
  if (!adapter_id.empty() && Target(adapter_id) == asked) {
    Forget(adapter_id);
    places_[adapter_id] =
        adapters_.insert(adapters_.end(), {adapter_id, owner});
    if (adapters_.size() > kMaxAdapters) {
      Forget(std::string(adapters_.front().first));
    }
  }
  if (all_follow) owner_ = owner;
  return absl::OkStatus();
}

void Route::Forget(const std::string& adapter_id) {
  const auto place = places_.find(adapter_id);
  if (place == places_.end()) return;
  adapters_.erase(place->second);
  places_.erase(place);
}

void Route::Leave(const std::string& asked) {
  absl::MutexLock lock(&mu_);
  for (auto place = places_.begin(); place != places_.end();) {
    const auto entry = place->second;
    if (entry->second == asked) {
      adapters_.erase(entry);
      place = places_.erase(place);
    } else {
      ++place;
    }
  }
  // Also after an owner: whoever named it may name it for ever, as one does
  // that knows it by an address which leads nowhere from here.
  if (Target() == asked) {
    owner_.clear();
    place_ = (place_ + 1) % addresses_.size();
  }
}

void Route::Restart(const std::string& adapter_id) {
  absl::MutexLock lock(&mu_);
  Forget(adapter_id);
  owner_.clear();
  place_ = 0;
}

Connection& Trip::Next() {
  asked_ = route_->target(adapter_id_);
  connection_ = route_->ConnectionTo(asked_);
  return *connection_;
}

absl::StatusOr<bool> Trip::GoesOn(const Failure& failure) {
  if (failure.reason == kMoved) {
    if (hops_ < kMaxHops) {
      ++hops_;
      WEFT_RETURN_IF_ERROR(route_->Follow(asked_, failure.owner, adapter_id_,
                                          failure.only_adapter));
      return true;
    }
    route_->Restart(adapter_id_);
  } else if (absl::IsUnavailable(failure.status)) {
    if (!failure.from_server || failure.reason == kStandby) {
      route_->Leave(asked_);
    }
    // Once for each address, and for an owner.
    if (failure.unsent && unsent_ < route_->num_addresses()) {
      ++unsent_;
      return route_->target(adapter_id_) != asked_;
    }
  }
  hops_ = 0;
  unsent_ = 0;
  return false;
}

}  // namespace weft::client
