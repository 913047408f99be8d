// Decides to which of several servers a client's calls go.
//
// Each adapter has one server, its owner, that runs the calls for it. Other
// servers answer MOVED with the owner's address, and have not run the call. So
// any call is safe to make there, and later calls for the adapter go there,
// too, until the owner cannot be reached. So do all other calls if the server
// that answered stands by. If it does not, its answer names the adapter.
#ifndef WEFT_CLIENT_ROUTE_H_
#define WEFT_CLIENT_ROUTE_H_

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/channel.h"
#include "client/connection.h"
#include "client/retry.h"

namespace weft::client {

// The connections of a client, which its handles and their calls share.
// Threads: any.
class Route {
 public:
  // The most adapters with an address of their own. Then the oldest is
  // forgotten, and the next call for it asks for the way again.
  static constexpr size_t kMaxAdapters = 10'000;

  // `target` is an address, or several HOST:PORT with commas between them.
  // Errors: those of OpenChannel for one of them.
  static absl::StatusOr<std::shared_ptr<Route>> Create(
      const std::string& target, const Security& security);

  size_t num_addresses() const { return addresses_.size(); }
  // Whether a call has had an answer (CallOptions).
  const std::shared_ptr<std::atomic<bool>>& answered() const {
    return answered_;
  }
  // Returns the address for calls for this adapter, or, if it is empty, for all
  // others.
  std::string target(const std::string& adapter_id = "") const
      ABSL_LOCKS_EXCLUDED(mu_);
  std::shared_ptr<Connection> ConnectionTo(const std::string& target)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Returns a route of its own to another server, which the one at `asked`
  // names. It shares the connections. Errors: those of Follow.
  absl::StatusOr<std::shared_ptr<Route>> Other(const std::string& asked,
                                               const std::string& named)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Notes that the server at `asked` names the owner of this adapter (empty:
  // the call was for none). `alone`: calls for other adapters, or for none, do
  // not belong there. Errors: FAILED_PRECONDITION if the owner's address is
  // none, or if a token would go there in plaintext.
  absl::Status Follow(const std::string& asked, const std::string& owner,
                      const std::string& adapter_id = "", bool alone = false)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Notes that the server at `asked` cannot be reached, or knows no owner.
  void Leave(const std::string& asked) ABSL_LOCKS_EXCLUDED(mu_);
  // Forgets the owners of this adapter and of all other calls, and begins with
  // the first address.
  void Restart(const std::string& adapter_id) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  Route(std::vector<std::string> addresses, Security security)
      : addresses_(std::move(addresses)), security_(std::move(security)) {}
  absl::Status Open(const std::string& address) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status OpenNamed(const std::string& asked, const std::string& named)
      ABSL_LOCKS_EXCLUDED(mu_);
  const std::string& Target(const std::string& adapter_id = "") const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Forget(const std::string& adapter_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::vector<std::string> addresses_;
  const Security security_;
  const std::shared_ptr<std::atomic<bool>> answered_ =
      std::make_shared<std::atomic<bool>>(false);
  mutable absl::Mutex mu_;
  // The address in use while no owner is known.
  size_t place_ ABSL_GUARDED_BY(mu_) = 0;
  std::string owner_ ABSL_GUARDED_BY(mu_);  // Empty: none is known.
  // Adapters with their owners' addresses, the oldest first.
  using Owners = std::list<std::pair<std::string, std::string>>;
  Owners adapters_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, Owners::iterator> places_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::shared_ptr<Connection>> connections_
      ABSL_GUARDED_BY(mu_);
};

// The servers that one call asks, for an adapter, or for none if it is empty.
// Threads: one attempt of the call at a time.
class Trip {
 public:
  Trip(std::shared_ptr<Route> route, std::string adapter_id)
      : route_(std::move(route)), adapter_id_(std::move(adapter_id)) {}

  // Returns the connection for the next attempt, and holds it meanwhile.
  Connection& Next();
  // Returns the address of the latest attempt.
  const std::string& asked() const { return asked_; }
  // Notes that the latest attempt failed. Returns whether the call goes on with
  // another attempt at once, because it has not run. If not, an attempt after
  // a pause may find another server. Errors: those of Route::Follow.
  absl::StatusOr<bool> GoesOn(const Failure& failure);

 private:
  const std::shared_ptr<Route> route_;
  const std::string adapter_id_;
  std::string asked_;
  std::shared_ptr<Connection> connection_;
  int hops_ = 0;       // Answers MOVED in a row.
  size_t unsent_ = 0;  // Attempts in a row without a connection.
};

}  // namespace weft::client

#endif  // WEFT_CLIENT_ROUTE_H_
