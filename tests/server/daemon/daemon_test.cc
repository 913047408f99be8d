// Tests the daemon from start to end in a child process, which gets signals.
#include "server/daemon/daemon.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <string>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/server_fixture.h"
#include "tests/support/canned_engine.h"
#include "tests/support/temp_folder.h"

namespace weft::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Runs `work`, whose result is the exit status, in a fork of this
// single-threaded process. "Threadsafe" death tests would do the same but
// cannot send signals.
pid_t Fork(const std::function<int()>& work,
           const std::string& log = "/dev/null") {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  dup2(open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600),
       STDERR_FILENO);
  _exit(work());
}

// Returns the exit status of a process that ends, or 128 and its signal.
int ExitOf(pid_t pid) {
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Returns the text of a file, and removes it.
std::string TakeText(const std::string& path) {
  std::ifstream file(path);
  std::string text(std::istreambuf_iterator<char>(file), {});
  std::filesystem::remove(path);
  return text;
}

// Runs RunDaemon in a fork.
class DaemonProcess {
 public:
  explicit DaemonProcess(EngineStarter starter, int drain_timeout_seconds = 5,
                         const std::string& log = "/dev/null")
      : port_file_(folder_.path() + "/ports") {
    Settings settings;
    settings.server.listen = "127.0.0.1:0";
    settings.server.metrics_listen = "127.0.0.1:0";
    settings.server.port_file = port_file_;
    settings.server.drain_timeout_seconds = drain_timeout_seconds;
    pid_ = Fork(
        [&] {
          LocalRanks none;
          return RunDaemon(settings, starter, &none);
        },
        log);
  }
  ~DaemonProcess() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  bool WaitUntilListening() const {
    for (int i = 0; i < 1000; ++i) {
      if (std::filesystem::exists(port_file_)) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }

  // Returns the liveness that a client sees. Asks in a separate process,
  // because this process must not fork after gRPC has run in it.
  int Liveness() const {
    std::ifstream file(port_file_);
    std::string address;
    std::getline(file, address);
    return ExitOf(Fork([&] {
      return std::abs(HealthOf(
          grpc::CreateChannel(address, grpc::InsecureChannelCredentials()),
          "liveness"));
    }));
  }

  void Signal(int signal) const { kill(pid_, signal); }

  int WaitForExit() { return ExitOf(std::exchange(pid_, -1)); }

 private:
  const TempFolder folder_;
  const std::string port_file_;
  pid_t pid_ = -1;
};

// Returns a starter of an engine that `prepare` has changed.
EngineStarter Canned(const std::function<void(CannedEngine&)>& prepare =
                         [](CannedEngine&) {}) {
  return [prepare](const EngineOptions&, prometheus::Registry*,
                   const engine::OnStandby&)
             -> absl::StatusOr<std::unique_ptr<engine::Engine>> {
    auto engine = std::make_unique<CannedEngine>();
    prepare(*engine);
    return engine;
  };
}

// Returns a starter that reports a damaged file after `seconds`.
EngineStarter FailAfter(double seconds) {
  return [seconds](const EngineOptions&, prometheus::Registry*,
                   const engine::OnStandby&)
             -> absl::StatusOr<std::unique_ptr<engine::Engine>> {
    absl::SleepFor(absl::Seconds(seconds));
    return absl::DataLossError("rank 1: a damaged file");
  };
}

// Holds the engine, so that a drain never finishes.
void Hold(CannedEngine& engine) { engine.Hold(); }

TEST(DaemonTest, TermDrainsAndExitsClean) {
  DaemonProcess daemon(Canned());
  ASSERT_TRUE(daemon.WaitUntilListening());
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  daemon.Signal(SIGTERM);
  const absl::Time start = absl::Now();
  EXPECT_EQ(daemon.WaitForExit(), 0);
  EXPECT_LT(absl::Now() - start, absl::Seconds(1));
}

// Makes an adapter that has two steps in no checkpoint.
void Train(CannedEngine& engine) {
  std::promise<void> made;
  engine.CreateAdapter({.adapter_id = "poet", .tenant = "t"},
                       [&](const auto&) { made.set_value(); });
  made.get_future().wait();
  for (const uint64_t step : {1, 2}) {
    TrainRequest request;
    request.adapter_id = "poet";
    request.step = step;
    request.data = {Datum{.tokens = {1}, .targets = {2}}};
    std::promise<void> trained;
    engine.Train(std::move(request), [&](const auto&) { trained.set_value(); });
    trained.get_future().wait();
  }
}

TEST(DaemonTest, WithoutAStateFolderItSaysWhatEndsWithIt) {
  const TempFolder folder;
  const std::string log = folder.path() + "/log";
  DaemonProcess daemon(Canned(Train), /*drain_timeout_seconds=*/5, log);
  ASSERT_TRUE(daemon.WaitUntilListening());
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.WaitForExit(), 0);
  EXPECT_THAT(
      TakeText(log),
      AllOf(HasSubstr("no --state-dir: a restart forgets"),
            HasSubstr("steps end with this process"), HasSubstr("poet: 2")));
}

TEST(DaemonTest, DrainTimeoutCutsWorkOff) {
  DaemonProcess daemon(Canned(Hold), /*drain_timeout_seconds=*/0);
  ASSERT_TRUE(daemon.WaitUntilListening());
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.WaitForExit(), 3);
}

TEST(DaemonTest, SecondSignalIsFast) {
  DaemonProcess daemon(Canned(Hold), /*drain_timeout_seconds=*/600);
  ASSERT_TRUE(daemon.WaitUntilListening());
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  daemon.Signal(SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  daemon.Signal(SIGINT);
  EXPECT_EQ(daemon.WaitForExit(), 3);
}

TEST(DaemonTest, SignalWhileLoadingExitsAtOnce) {
  DaemonProcess daemon(FailAfter(60));
  ASSERT_TRUE(daemon.WaitUntilListening());
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.WaitForExit(), 0);
}

TEST(DaemonTest, EngineThatCannotStartEndsTheDaemon) {
  DaemonProcess daemon(FailAfter(0));
  const absl::Time start = absl::Now();
  EXPECT_EQ(daemon.WaitForExit(), 1);
  EXPECT_LT(absl::Now() - start, absl::Seconds(1));
}

TEST(DaemonTest, EngineThatFailsEndsTheDaemon) {
  DaemonProcess daemon(Canned([](CannedEngine& engine) {
    engine.FailForGood(absl::UnavailableError("a rank is gone"));
  }));
  EXPECT_EQ(daemon.WaitForExit(), 1);
}

// Returns a starter of an engine whose heartbeat is `age` old and does not
// advance.
EngineStarter Hanging(absl::Duration age) {
  return Canned(
      [age](CannedEngine& engine) { engine.HangSince(absl::Now() - age); });
}

// Returns the daemon's liveness with such an engine.
int LivenessAfterHang(absl::Duration age) {
  DaemonProcess daemon(Hanging(age));
  EXPECT_TRUE(daemon.WaitUntilListening());
  absl::SleepFor(absl::Seconds(1));
  const int liveness = daemon.Liveness();
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.WaitForExit(), 0);
  return liveness;
}

TEST(DaemonTest, AnEngineThatHangsIsNotAlive) {
  EXPECT_EQ(LivenessAfterHang(kHeartbeatLimit + absl::Seconds(1)), kNotServing);
}

TEST(DaemonTest, AnEngineInALongStepIsAlive) {
  EXPECT_EQ(LivenessAfterHang(kHeartbeatLimit - absl::Minutes(1)), kServing);
}

TEST(DaemonTest, AnEngineThatHangsOnEndsTheDaemon) {
  DaemonProcess daemon(
      Hanging(kHeartbeatLimit + kHangGrace + absl::Seconds(1)));
  EXPECT_EQ(daemon.WaitForExit(), 1);
}

TEST(DaemonTest, AWorkerProcessEndsAsItsWorkDoes) {
  for (const auto& [status, expected] :
       {std::pair(absl::OkStatus(), 0),
        std::pair(absl::InternalError("rank 0 is gone"), 1)}) {
    const pid_t pid = Fork([&] {
      return RunWorkerProcess(
          {}, [&](const EngineOptions&, const std::function<void()>& /*met*/) {
            return status;
          });
    });
    EXPECT_EQ(ExitOf(pid), expected);
  }
}

// Runs a worker process that sleeps for `seconds`, before or after it has met
// rank 0. Sends it SIGTERM and returns how long it took to end.
absl::Duration TimeToEnd(bool has_met, double seconds, int* exit_status) {
  int begun[2];
  EXPECT_EQ(pipe(begun), 0);
  const pid_t pid = Fork([&] {
    return RunWorkerProcess(
        {}, [&](const EngineOptions&, const std::function<void()>& met) {
          if (has_met) met();
          EXPECT_EQ(write(begun[1], "", 1), 1);
          absl::SleepFor(absl::Seconds(seconds));
          return absl::OkStatus();
        });
  });
  char byte = 0;
  EXPECT_EQ(read(begun[0], &byte, 1), 1);
  close(begun[0]);
  close(begun[1]);
  const absl::Time start = absl::Now();
  kill(pid, SIGTERM);
  *exit_status = ExitOf(pid);
  return absl::Now() - start;
}

TEST(DaemonTest, AWorkerProcessThatHasNotMetRank0EndsAtOnce) {
  int exit_status = -1;
  EXPECT_LT(TimeToEnd(/*has_met=*/false, /*seconds=*/60, &exit_status),
            absl::Seconds(10));
  EXPECT_EQ(exit_status, 0);
}

TEST(DaemonTest, AWorkerProcessThatHasMetRank0LeavesSignalsToIt) {
  int exit_status = -1;
  EXPECT_GT(TimeToEnd(/*has_met=*/true, /*seconds=*/1, &exit_status),
            absl::Milliseconds(500));
  EXPECT_EQ(exit_status, 0);
}

TEST(DaemonTest, RanksAreNotForkedBesideAnotherThread) {
  const pid_t pid = Fork([] {
    std::thread([] { absl::SleepFor(absl::Seconds(30)); }).detach();
    World world;
    const absl::StatusOr<LocalRanks> others = LocalRanks::Spawn(2, &world);
    return absl::IsUnavailable(others.status()) ? 0 : 1;
  });
  EXPECT_EQ(ExitOf(pid), 0);
}

// Runs a daemon whose other rank ends at once. Meanwhile `start` loads the
// engine. Checks the exit status and returns the log.
std::string LogOfAStartWithoutARank(const EngineStarter& start) {
  const TempFolder folder;
  const std::string log = folder.path() + "/log";
  const pid_t pid = Fork(
      [&] {
        World world;
        absl::StatusOr<LocalRanks> others = LocalRanks::Spawn(2, &world);
        if (world.rank > 0) return 0;
        Settings settings;
        settings.server.listen = "127.0.0.1:0";
        settings.server.metrics_listen = "";
        alarm(30);  // Kills a daemon that does not exit.
        return RunDaemon(settings, start, &*others);
      },
      log);
  EXPECT_EQ(ExitOf(pid), 1);
  return TakeText(log);
}

TEST(DaemonTest, ARankThatEndsWhileLoadingIsNamedWithItsReason) {
  EXPECT_THAT(LogOfAStartWithoutARank(FailAfter(1)),
              HasSubstr("rank 1: a damaged file"));
}

TEST(DaemonTest, ARankThatEndsWhileLoadingWithoutAReasonEndsTheDaemon) {
  EXPECT_THAT(LogOfAStartWithoutARank(FailAfter(600)),
              HasSubstr("exited with status 0"));
}

TEST(DaemonTest, ARankThatEndsBeforeLoadingSucceedsEndsTheDaemon) {
  const EngineStarter start = Canned([](CannedEngine&) {
    // Waits until the daemon has noticed that the rank ended. From then on the
    // process has no more children, so waitid fails.
    siginfo_t info;
    while (waitid(P_ALL, 0, &info, WEXITED | WNOWAIT) == 0) {
      absl::SleepFor(absl::Milliseconds(1));
    }
  });
  EXPECT_THAT(LogOfAStartWithoutARank(start),
              AllOf(HasSubstr("exited with status 0"),
                    Not(HasSubstr("engine started"))));
}

TEST(DaemonTest, TakenPortEndsTheDaemon) {
  Settings settings;
  settings.server.listen = "192.0.2.1:1";  // No machine has this address.
  settings.server.metrics_listen = "";
  const pid_t pid = Fork([&] {
    LocalRanks none;
    return RunDaemon(settings, Canned(), &none);
  });
  EXPECT_EQ(ExitOf(pid), 1);
}

}  // namespace
}  // namespace weft::server
