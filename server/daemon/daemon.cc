#include "server/daemon/daemon.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "server/daemon/listeners.h"
#include "server/flags/version.h"
#include "server/grpc/grpc_log.h"
#include "src/base/address.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"

namespace weft::server {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitCutOff = 3;
constexpr int kExitFenced = 4;

// How long open calls may run after the engine has drained.
constexpr absl::Duration kStreamGrace = absl::Seconds(2);
// How long the process may take to stop after a drain was cut off.
constexpr absl::Duration kCutOffGrace = absl::Seconds(15);
// How long the process may take to stop after the engine has failed. Calls that
// wait for the disk or the device may never get an answer.
constexpr absl::Duration kFailureGrace = absl::Seconds(1);
// How long loading may still run after another rank has ended, so that it can
// return an error.
constexpr absl::Duration kReasonGrace = absl::Seconds(3);
constexpr absl::Duration kWatchInterval = absl::Milliseconds(100);
// Drain checks at short intervals, because an idle engine drains at once.
constexpr absl::Duration kDrainInterval = absl::Milliseconds(5);

// How long the log's last lines may take when the process ends.
constexpr absl::Duration kLogGrace = absl::Seconds(1);

void SetUpLog(const ServerOptions& options) {
  const bool is_terminal = isatty(STDERR_FILENO) == 1;
  const bool json = options.log_style == LogStyle::kJson ||
                    (options.log_style == LogStyle::kAuto && !is_terminal);
  SetLogFormat(json ? LogFormat::kJson : LogFormat::kText);
  SetLogLevel(options.log_level);
  StartLogThread();
  TakeOverGrpcLog();
}

[[noreturn]] void ExitNow(int status) {
  FlushLog(kLogGrace);
  std::_Exit(status);
}

// Raises the limit of open files as far as the system permits, because every
// connection needs a descriptor.
void RaiseFileLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    Log(LogLevel::kWarning, "cannot raise the limit of open files",
        {{"errno", errno}});
  }
}

// Receives SIGTERM and SIGINT, and the signals whose default would end the
// process without a drain. Every thread blocks these signals, and the main
// thread fetches them with Wait. Also ignores SIGPIPE, and SIGXFSZ: the write
// beyond `ulimit -f` fails.
class StopSignals {
 public:
  // Call it before any thread is created: new threads inherit the signal mask.
  StopSignals() {
    sigemptyset(&set_);
    for (const int signal :
         {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGALRM}) {
      sigaddset(&set_, signal);
    }
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    struct sigaction ignore = {};
    ignore.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &ignore, nullptr);
    sigaction(SIGXFSZ, &ignore, nullptr);
  }

  // Returns SIGTERM or SIGINT if it came within `timeout`, or 0. Says that
  // other signals have no effect.
  int Wait(absl::Duration timeout) const {
    const timespec limit = absl::ToTimespec(timeout);
    const int signal = sigtimedwait(&set_, nullptr, &limit);
    if (signal == SIGTERM || signal == SIGINT) return signal;
    if (signal > 0) {
      Log(LogLevel::kInfo,
          "a signal without effect: tokens are read when their file changes, "
          "and SIGTERM ends the server",
          {{"signal", sigabbrev_np(signal)}});
    }
    return 0;
  }

 private:
  sigset_t set_;
};

// Logs how many seconds each stage of the process took.
class StageLog {
 public:
  void Done(const char* stage) {
    const absl::Time now = SteadyNow();
    Log(LogLevel::kInfo, stage,
        {{"seconds", absl::ToDoubleSeconds(now - last_)}});
    last_ = now;
  }

 private:
  absl::Time last_ = SteadyNow();
};

// Drains the engine. Stops waiting if `timeout` passes, a second signal comes
// or `health` returns an error. Returns whether all accepted work is done.
bool Drain(engine::Engine* engine, const StopSignals& signals,
           absl::Duration timeout,
           const std::function<absl::Status()>& health) {
  // Shared with the callback, which may run after this function has returned.
  const auto drained = std::make_shared<std::atomic<bool>>(false);
  engine->Finish([drained](const absl::StatusOr<bool>& /*result*/) {
    drained->store(true);
  });
  const absl::Time limit = SteadyNow() + timeout;
  while (!drained->load()) {
    if (!health().ok()) return false;
    if (SteadyNow() >= limit) {
      Log(LogLevel::kWarning, "drain timed out; cutting work off");
      return false;
    }
    if (signals.Wait(kDrainInterval) != 0) {
      Log(LogLevel::kWarning, "second signal; cutting work off");
      return false;
    }
  }
  // If the engine has failed, its work ends without results, and so does the
  // drain.
  return health().ok();
}

// Says which adapters will end with the process, because they have steps that
// are neither in --state-dir nor in a checkpoint.
void LogLostSteps(engine::Engine* engine) {
  constexpr size_t kMaxNamed = 20;
  std::vector<std::string> named;
  size_t count = 0;
  const auto max = static_cast<size_t>(engine->info().max_adapters);
  // The callback runs before ListAdapters returns.
  engine->ListAdapters({.size = max}, [&](absl::StatusOr<AdapterPage> page) {
    if (!page.ok()) return;
    for (const AdapterInfo& info : page->adapters) {
      if (info.durability != Durability::kMemory ||
          info.next_step <= info.durable_step + 1) {
        continue;
      }
      if (++count > kMaxNamed) continue;
      named.push_back(absl::StrCat(info.adapter_id, ": ",
                                   info.next_step - 1 - info.durable_step));
    }
  });
  if (count == 0) return;
  Log(LogLevel::kWarning,
      "steps end with this process: they are neither in --state-dir nor in a "
      "checkpoint",
      {{"adapters", count}, {"steps", absl::StrJoin(named, ", ")}});
}

// Warns of settings that an operator may not have meant.
void LogDoubts(const Settings& settings) {
  for (const std::string& complaint : settings.unknown_variables) {
    Log(LogLevel::kWarning, complaint);
  }
  if (settings.engine.keeps_state()) return;
  Log(LogLevel::kWarning,
      "no --state-dir: a restart forgets adapters and every step after their "
      "last checkpoint");
}

void LogFailure(const char* what, const absl::Status& status) {
  Log(LogLevel::kError, what,
      {{"code", absl::StatusCodeToString(status.code())},
       {"error", std::string(status.message())}});
}

// Returns the exit status of a process that ends with an error.
int ExitOf(const absl::Status& status) {
  return absl::IsAborted(status) ? kExitFenced : kExitFailed;
}

// Fills in the defaults of --instance and --advertise-address for a gRPC server
// that listens on `address`.
void NameInstance(const std::string& address, EngineOptions* options) {
  char name[HOST_NAME_MAX + 1] = {};
  gethostname(name, sizeof(name) - 1);
  const absl::StatusOr<HostPort> listens = ParseHostPort("listen", address);
  if (options->instance.empty()) {
    options->instance =
        listens.ok() ? absl::StrCat(name, "-", listens->port) : name;
  }
  // Nobody else reaches a Unix socket.
  if (!options->advertise_address.empty() || !listens.ok()) return;
  options->advertise_address = IsLoopback(listens->host)
                                   ? address
                                   : absl::StrCat(name, ":", listens->port);
}

// Starts the engine on a separate thread and watches for signals. A signal ends
// the process at once, because no work was accepted and loading cannot be
// interrupted. If another rank ends, loading might wait for the ended rank
// forever. So loading has kReasonGrace left to return an error, and then the
// process ends. It also ends if loading succeeds although a rank has ended.
absl::StatusOr<std::unique_ptr<engine::Engine>> Load(
    const EngineOptions& options, const EngineStarter& start_engine,
    const StopSignals& signals, Listeners* listeners,
    prometheus::Registry* registry, LocalRanks* others) {
  absl::StatusOr<std::unique_ptr<engine::Engine>> engine;
  std::atomic<bool> done{false};
  std::thread loader([&] {
    engine =
        start_engine(options, registry, [listeners](const std::string& owner) {
          listeners->SetStandby(owner);
        });
    done.store(true);
  });
  absl::Time give_up = absl::InfiniteFuture();
  while (!done.load()) {
    if (const absl::Status ended = others->Check(); !ended.ok()) {
      LogFailure("another rank has ended", ended);
      give_up = std::min(give_up, SteadyNow() + kReasonGrace);
    }
    if (SteadyNow() >= give_up) ExitNow(kExitFailed);
    if (signals.Wait(absl::Milliseconds(20)) == 0) continue;
    Log(LogLevel::kInfo, "stopped while loading");
    ExitNow(0);
  }
  loader.join();
  // The engine cannot compute without the rank that has ended. Serve would not
  // notice the missing rank, because Check reports the end of a rank only once.
  if (engine.ok() && give_up != absl::InfiniteFuture()) {
    ExitNow(kExitFailed);
  }
  return engine;
}

// Ends the process with `status` after `grace`, even if a device or a group of
// ranks hangs.
void ExitLater(int status, absl::Duration grace) {
  std::thread([status, grace] {
    absl::SleepFor(grace);
    ExitNow(status);
  }).detach();
}

// Returns UNAVAILABLE if the engine's last heartbeat is older than
// kHeartbeatLimit + kHangGrace.
absl::Status CheckHeartbeat(const engine::Engine& engine) {
  const absl::Duration age = SteadyNow() - engine.last_heartbeat();
  if (age <= kHeartbeatLimit + kHangGrace) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("the engine has not moved for ", absl::FormatDuration(age)));
}

// Stops without a drain. Calls that the engine does not answer soon are cut
// off. Returns the exit status.
int Fail(const absl::Status& status, Listeners* listeners) {
  LogFailure("the engine has failed", status);
  const int exit = ExitOf(status);
  ExitLater(exit, kFailureGrace);
  listeners->StartDraining();
  listeners->Shutdown(kFailureGrace / 2);
  return exit;
}

int Serve(const Settings& settings, const EngineStarter& start_engine,
          const StopSignals& signals, Listeners* listeners,
          prometheus::Registry* registry, LocalRanks* others) {
  StageLog stages;
  listeners->SetLoading();
  absl::StatusOr<std::unique_ptr<engine::Engine>> engine =
      Load(settings.engine, start_engine, signals, listeners, registry, others);
  if (!engine.ok()) {
    LogFailure("the engine did not start", engine.status());
    others->Kill();
    return ExitOf(engine.status());
  }
  stages.Done("engine started");
  listeners->SetEngine(engine->get());
  Log(LogLevel::kInfo, "serving",
      {{"model", settings.server.model_name},
       {"device", (*engine)->info().device},
       {"dtype", (*engine)->info().dtype},
       {"listen", listeners->address()},
       {"metrics", listeners->metrics_address()},
       {"console", listeners->console_url()}});

  absl::Status failure;
  const auto health = [&] {
    listeners->UpdateLiveness(SteadyNow());
    listeners->CancelStalledCalls(SteadyNow());
    listeners->RecordLoad(SteadyNow());
    if (failure.ok()) {
      failure = (*engine)->failure();
      if (!failure.ok()) (*engine)->ExcuseRunning();
    }
    if (failure.ok()) failure = others->Check();
    if (failure.ok()) failure = CheckHeartbeat(**engine);
    return failure;
  };
  while (signals.Wait(kWatchInterval) == 0) {
    if (!health().ok()) return Fail(failure, listeners);
  }
  Log(LogLevel::kInfo, "draining",
      {{"timeout_seconds", settings.server.drain_timeout_seconds}});
  listeners->StartDraining();
  const bool clean =
      Drain(engine->get(), signals,
            absl::Seconds(settings.server.drain_timeout_seconds), health);
  if (!failure.ok()) return Fail(failure, listeners);
  LogLostSteps(engine->get());
  if (!clean) {
    (*engine)->ExcuseRunning();
    ExitLater(kExitCutOff, kCutOffGrace);
  }
  // Shutdown cancels the remaining calls and waits until they have ended.
  listeners->Shutdown(clean ? kStreamGrace : absl::ZeroDuration());
  stages.Done("stopped");
  return clean ? 0 : kExitCutOff;
}

}  // namespace

int RunWorkerProcess(const Settings& settings, const RemoteWork& work) {
  const StopSignals signals;
  SetUpLog(settings.server);
  const absl::Cleanup flush = [] { FlushLog(kLogGrace); };
  std::atomic<bool> met{false};
  std::atomic<bool> done{false};
  absl::Status status;
  std::thread worker([&] {
    status = work(settings.engine, [&] { met.store(true); });
    done.store(true);
  });
  while (!met.load() && !done.load()) {
    if (signals.Wait(absl::Milliseconds(20)) == 0 || met.load()) continue;
    Log(LogLevel::kInfo, "stopped before rank 0 was met");
    ExitNow(0);
  }
  worker.join();
  if (status.ok()) return 0;
  LogFailure("the rank stops", status);
  return kExitFailed;
}

int RunDaemon(const Settings& settings, const EngineStarter& start_engine,
              LocalRanks* others) {
  const StopSignals signals;
  SetUpLog(settings.server);
  const absl::Cleanup flush = [] { FlushLog(kLogGrace); };
  RaiseFileLimit();
  Log(LogLevel::kInfo, "weftd starts",
      {{"version", kVersion}, {"git", kGitRevision}});
  LogDoubts(settings);
  StageLog stages;
  const auto registry = std::make_shared<prometheus::Registry>();
  Settings own = settings;
  own.server.keeps_state = settings.engine.keeps_state();
  const auto listeners = Listeners::Start(
      own.server, registry, TokenizerFiles::Load(settings.engine.model_dir));
  if (!listeners.ok()) {
    Log(LogLevel::kError, "cannot listen",
        {{"error", std::string(listeners.status().message())}});
    return kExitFailed;
  }
  stages.Done("listening");
  Log(LogLevel::kInfo, "addresses",
      {{"listen", (*listeners)->address()},
       {"metrics", (*listeners)->metrics_address()},
       {"console", (*listeners)->console_url()}});
  NameInstance((*listeners)->address(), &own.engine);
  return Serve(own, start_engine, signals, listeners->get(), registry.get(),
               others);
}

}  // namespace weft::server
