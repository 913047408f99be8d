// Adapters that the front asks about, and that it deletes.
//
// The engine may refuse a deletion, for example because it drains. The front
// then tries again every two seconds. The ledger keeps which adapters are to be
// deleted, so the tries go on after a restart.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_ADAPTERS_H_
#define WEFT_SERVER_TINKER_ADAPTERS_H_

#include <cstddef>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "server/call/call.h"
#include "server/call/engine_port.h"
#include "src/request/adapter.h"

namespace weft::server::tinker {

struct Call;   // front.h
struct Front;  // front.h

// Asks the engine once to delete an adapter, and writes nothing to the ledger.
// Errors: those of EnginePort::Call.
absl::Status DeleteAdapterOf(Front& front, CallOrigin origin,
                             const std::string& adapter, Callback<bool> done);

// Asks the engine about an adapter. Errors: those of EnginePort::Call.
absl::Status GetAdapterOf(Front& front, CallOrigin origin,
                          const std::string& adapter,
                          Callback<AdapterInfo> done);

class Adapters {
 public:
  // `front` outlives this object and its calls.
  explicit Adapters(Front* front) : front_(*front) {}

  // Deletes the caller's adapter, now or later.
  void Delete(const Caller& caller, const std::string& adapter);
  // Tries again all deletions that have not succeeded.
  void SweepDeletions();
  // Reads from the ledger which adapters are to be deleted.
  void Restore();

  // Returns the number of adapters that are to be deleted.
  size_t num_deletions() const { return deletions_.size(); }

 private:
  // An adapter that is to be deleted.
  struct Deletion {
    Caller caller;
    std::string adapter;
    bool running = false;  // The engine handles a request to delete it.
  };

  // Asks the engine to delete the adapter of deletions_[key], unless such a
  // request is running already. An adapter that does not exist counts as
  // deleted.
  void TryToDelete(const std::string& key);

  Front& front_;
  std::map<std::string, Deletion> deletions_;  // Keys have owner and adapter.
};

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_ADAPTERS_H_
