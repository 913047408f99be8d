// The command that gives all logs of a state about as many adapters.
#include <cstddef>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/weftctl/balance.h"
#include "client/weftctl/commands.h"
#include "client/weftctl/output.h"
#include "nlohmann/json.hpp"
#include "src/base/clock.h"
#include "src/base/status_macros.h"
#include "src/log/bucket/log_owner.h"
#include "src/log/bucket/state_bucket.h"
#include "src/request/move_unit.h"
#include "src/store/open_store.h"

namespace weft::client::weftctl {
namespace {

using nlohmann::json;

// Returns whether an error is that of one server, so that others may go on.
bool IsOfOneServer(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

class Balancer {
 public:
  Balancer(const Session& session, absl::Duration pause)
      : session_(session), pause_(pause) {}

  absl::Status Run() {
    WEFT_ASSIGN_OR_RETURN(
        auto objects, store::OpenStore(session_.arguments.word(0), nullptr));
    WEFT_ASSIGN_OR_RETURN(
        const auto bucket,
        log::StateBucket::Open(std::move(objects), std::nullopt, false));
    // Between two moves adapters come, go and train, and logs change owners.
    for (bool moved = true; moved;) {
      WEFT_RETURN_IF_ERROR(Look(*bucket));
      WEFT_ASSIGN_OR_RETURN(moved, MoveOne());
    }
    Report();
    return absl::OkStatus();
  }

 private:
  // Lists the adapters of all logs that a server has.
  absl::Status Look(const log::StateBucket& bucket) {
    loads_.clear();
    owners_.clear();
    WEFT_ASSIGN_OR_RETURN(const std::vector<int> logs, bucket.ListLogs());
    const auto seen = log::LookAtManifests(*bucket.objects(), logs.back() + 1);
    for (const int log : logs) {
      WEFT_RETURN_IF_ERROR(seen[log].status());
      const log::Manifest& manifest = seen[log]->manifest;
      if (manifest.drained || manifest.released ||
          manifest.owner.address.empty()) {
        continue;
      }
      WEFT_ASSIGN_OR_RETURN(auto owner,
                            session_.connect(manifest.owner.address));
      const auto list = owner->ListAdapters(/*of_all_servers=*/false);
      if (IsOfOneServer(list.status())) {
        LeaveOut(log, list.status());
        continue;
      }
      WEFT_RETURN_IF_ERROR(list.status());
      Add(LoadOf(log, *list), std::move(owner));
    }
    return absl::OkStatus();
  }

  void Add(LogLoad load, std::unique_ptr<Client> owner) {
    std::erase_if(load.movable, [this](const MovableUnit& unit) {
      return staying_.contains(UnitOf(unit.adapter_id));
    });
    load.takes = !left_out_.contains(load.log);
    loads_.push_back(std::move(load));
    owners_.push_back(std::move(owner));
  }

  // Returns whether a unit has moved, or a server does not answer.
  absl::StatusOr<bool> MoveOne() {
    while (const std::optional<BalanceMove> move = NextMove(loads_)) {
      absl::SleepFor(next_ - SteadyNow());
      const absl::Time begin = SteadyNow();
      WEFT_ASSIGN_OR_RETURN(const bool looks, Move(*move));
      if (!looks) continue;
      next_ = begin + pause_;
      return true;
    }
    return false;
  }

  // Returns false if the unit, or the other log, is left out from now on, and
  // nothing else has changed.
  absl::StatusOr<bool> Move(const BalanceMove& move) {
    const LogLoad& from = loads_[move.from];
    LogLoad& to = loads_[move.to];
    const absl::Status status = owners_[move.from]->MoveAdapter(
        move.adapter_id, static_cast<uint32_t>(to.log));
    if (absl::IsPermissionDenied(status) || absl::IsUnauthenticated(status)) {
      return status;
    }
    // Each unit moves once, so that the command ends.
    staying_.insert(UnitOf(move.adapter_id));
    if (absl::IsNotFound(status)) return false;
    if (IsOfOneServer(status)) {
      session_.err << Printable(move.adapter_id)
                   << " stays: " << Printable(status.message()) << "\n";
      return true;
    }
    if (!status.ok()) {
      to.takes = false;
      LeaveOut(to.log, status);
      return false;
    }
    ++num_moved_;
    session_.err << "moved " << Printable(move.adapter_id) << " from log "
                 << from.log << " (" << from.num_adapters
                 << " adapters) to log " << to.log << " (" << to.num_adapters
                 << ")\n";
    return true;
  }

  void LeaveOut(int log, const absl::Status& reason) {
    if (!left_out_.insert(log).second) return;
    session_.err << "log " << log
                 << " is left out: " << Printable(reason.message()) << "\n";
  }

  void Report() const {
    session_.err << num_moved_ << " adapters moved\n";
    json logs = json::array();
    std::vector<Row> rows = {{"LOG", "ADAPTERS"}};
    for (const LogLoad& one : loads_) {
      logs.push_back({{"log", one.log}, {"adapters", one.num_adapters}});
      rows.push_back({absl::StrCat(one.log), absl::StrCat(one.num_adapters)});
    }
    if (session_.json) {
      session_.out << logs.dump() << "\n";
    } else {
      PrintTable(std::move(rows), session_.out);
    }
  }

  const Session& session_;
  const absl::Duration pause_;  // From the begin of a move to that of the next.
  absl::Time next_ = absl::InfinitePast();
  std::vector<LogLoad> loads_;
  std::vector<std::unique_ptr<Client>> owners_;  // Of loads_.
  std::set<std::string> staying_;                // Units.
  std::set<int> left_out_;                       // Logs that do not take any.
  size_t num_moved_ = 0;
};

absl::Status Balance(const Session& session) {
  WEFT_ASSIGN_OR_RETURN(const double rate, session.arguments.GetDouble("rate"));
  if (!(rate > 0)) return UsageError("--rate: must be > 0");
  return Balancer(session, absl::Seconds(1 / rate)).Run();
}

}  // namespace

std::vector<Command> BalanceCommands() {
  return {{.name = "fleet balance",
           .help = "take adapters from the logs of a state that have most to "
                   "those that have least, the longest unused first, until "
                   "they differ by one, or by 10 %",
           .run = Balance,
           .words = {"s3://BUCKET/PREFIX"},
           .flags = {{"rate", "R", "adapters a second, at most", "1"}},
           .offline = true}};
}

}  // namespace weft::client::weftctl
