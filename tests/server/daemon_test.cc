// Tests the daemon from start to end in a child process, which gets signals.
#include "server/daemon/daemon.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/server_fixture.h"
#include "tests/support/canned_engine.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Runs RunDaemon in a fork of this single-threaded process. "Threadsafe" death
// tests would do the same but cannot send signals.
class DaemonProcess {
 public:
  explicit DaemonProcess(EngineStarter starter, int drain_timeout_seconds = 5,
                         const std::string& log = "/dev/null")
      : port_file_(
            absl::StrCat(::testing::TempDir(), "/weft_daemon_", getpid())) {
    std::filesystem::remove(port_file_);
    Settings settings;
    settings.server.listen = "127.0.0.1:0";
    settings.server.metrics_listen = "127.0.0.1:0";
    settings.server.port_file = port_file_;
    settings.server.drain_timeout_seconds = drain_timeout_seconds;
    pid_ = fork();
    if (pid_ == 0) {
      const int quiet =
          open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
      dup2(quiet, STDERR_FILENO);
      LocalRanks none;
      _exit(RunDaemon(settings, starter, &none));
    }
  }
  ~DaemonProcess() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    std::filesystem::remove(port_file_);
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
    const pid_t pid = fork();
    if (pid == 0) {
      _exit(std::abs(HealthOf(
          grpc::CreateChannel(address, grpc::InsecureChannelCredentials()),
          "liveness")));
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return WEXITSTATUS(status);
  }

  void Signal(int signal) const { kill(pid_, signal); }

  int WaitForExit() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  const std::string port_file_;
  pid_t pid_ = -1;
};

absl::StatusOr<std::unique_ptr<Engine>> StartCanned(const EngineOptions&,
                                                    prometheus::Registry*) {
  return std::make_unique<CannedEngine>();
}

// Starts an engine that is held, so that a drain never finishes.
absl::StatusOr<std::unique_ptr<Engine>> StartStuck(const EngineOptions&,
                                                   prometheus::Registry*) {
  auto engine = std::make_unique<CannedEngine>();
  engine->Hold();
  return engine;
}

TEST(DaemonTest, TermDrainsAndExitsClean) {
  DaemonProcess daemon(StartCanned);
  ASSERT_TRUE(daemon.WaitUntilListening());
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  daemon.Signal(SIGTERM);
  const absl::Time start = absl::Now();
  EXPECT_EQ(daemon.WaitForExit(), 0);
  EXPECT_LT(absl::Now() - start, absl::Seconds(1));
}

// Starts an engine with an adapter that has two steps in no checkpoint.
absl::StatusOr<std::unique_ptr<Engine>> StartTrained(const EngineOptions&,
                                                     prometheus::Registry*) {
  auto engine = std::make_unique<CannedEngine>();
  std::promise<void> made;
  engine->CreateAdapter({.adapter_id = "poet", .tenant = "t"},
                        [&](const auto&) { made.set_value(); });
  made.get_future().wait();
  for (const uint64_t step : {1, 2}) {
    TrainRequest request;
    request.adapter_id = "poet";
    request.step = step;
    request.data = {Datum{.tokens = {1}, .targets = {2}}};
    std::promise<void> trained;
    engine->Train(std::move(request),
                  [&](const auto&) { trained.set_value(); });
    trained.get_future().wait();
  }
  return engine;
}

TEST(DaemonTest, WithoutAStateFolderItSaysWhatEndsWithIt) {
  const std::string log = absl::StrCat(::testing::TempDir(), "/lost_steps.log");
  DaemonProcess daemon(StartTrained, /*drain_timeout_seconds=*/5, log);
  ASSERT_TRUE(daemon.WaitUntilListening());
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.WaitForExit(), 0);
  std::ifstream file(log);
  const std::string text((std::istreambuf_iterator<char>(file)),
                         std::istreambuf_iterator<char>());
  EXPECT_THAT(text, AllOf(HasSubstr("no --state-dir: a restart forgets"),
                          HasSubstr("steps end with this process"),
                          HasSubstr("poet: 2")));
  std::filesystem::remove(log);
}

TEST(DaemonTest, DrainTimeoutCutsWorkOff) {
  DaemonProcess daemon(StartStuck, /*drain_timeout_seconds=*/0);
  ASSERT_TRUE(daemon.WaitUntilListening());
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.WaitForExit(), 3);
}

TEST(DaemonTest, SecondSignalIsFast) {
  DaemonProcess daemon(StartStuck, /*drain_timeout_seconds=*/600);
  ASSERT_TRUE(daemon.WaitUntilListening());
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  daemon.Signal(SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  daemon.Signal(SIGINT);
  EXPECT_EQ(daemon.WaitForExit(), 3);
}

TEST(DaemonTest, SignalWhileLoadingExitsAtOnce) {
  DaemonProcess daemon(
      [](const EngineOptions&,
         prometheus::Registry*) -> absl::StatusOr<std::unique_ptr<Engine>> {
        std::this_thread::sleep_for(std::chrono::seconds(60));
        return std::make_unique<CannedEngine>();
      });
  ASSERT_TRUE(daemon.WaitUntilListening());
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.WaitForExit(), 0);
}

TEST(DaemonTest, EngineThatCannotStartEndsTheDaemon) {
  DaemonProcess daemon(
      [](const EngineOptions&,
         prometheus::Registry*) -> absl::StatusOr<std::unique_ptr<Engine>> {
        return absl::NotFoundError("no model");
      });
  const absl::Time start = absl::Now();
  EXPECT_EQ(daemon.WaitForExit(), 1);
  EXPECT_LT(absl::Now() - start, absl::Seconds(1));
}

TEST(DaemonTest, EngineThatFailsEndsTheDaemon) {
  DaemonProcess daemon(
      [](const EngineOptions&,
         prometheus::Registry*) -> absl::StatusOr<std::unique_ptr<Engine>> {
        auto engine = std::make_unique<CannedEngine>();
        engine->FailForGood(absl::UnavailableError("a rank is gone"));
        return engine;
      });
  EXPECT_EQ(daemon.WaitForExit(), 1);
}

// Returns the daemon's liveness with an engine whose heartbeat is `age` old and
// does not advance.
int LivenessAfterHang(absl::Duration age) {
  DaemonProcess daemon(
      [age](const EngineOptions&,
            prometheus::Registry*) -> absl::StatusOr<std::unique_ptr<Engine>> {
        auto engine = std::make_unique<CannedEngine>();
        engine->HangSince(absl::Now() - age);
        return engine;
      });
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
      [](const EngineOptions&,
         prometheus::Registry*) -> absl::StatusOr<std::unique_ptr<Engine>> {
        auto engine = std::make_unique<CannedEngine>();
        engine->HangSince(absl::Now() - kHeartbeatLimit - kHangGrace -
                          absl::Seconds(1));
        return engine;
      });
  EXPECT_EQ(daemon.WaitForExit(), 1);
}

TEST(DaemonTest, AWorkerProcessEndsAsItsWorkDoes) {
  for (const auto& [status, expected] :
       {std::pair(absl::OkStatus(), 0),
        std::pair(absl::InternalError("rank 0 is gone"), 1)}) {
    const pid_t pid = fork();
    if (pid == 0) {
      const int quiet = open("/dev/null", O_WRONLY | O_CLOEXEC);
      dup2(quiet, STDERR_FILENO);
      _exit(RunWorkerProcess(
          {}, [&](const EngineOptions&, const std::function<void()>& /*met*/) {
            return status;
          }));
    }
    int ended = 0;
    waitpid(pid, &ended, 0);
    EXPECT_EQ(WEXITSTATUS(ended), expected);
  }
}

// Runs a worker process that sleeps for `seconds`, before or after it has met
// rank 0. Sends it SIGTERM and returns how long it took to end.
absl::Duration TimeToEnd(bool has_met, double seconds, int* exit_status) {
  int begun[2];
  EXPECT_EQ(pipe(begun), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    const int quiet = open("/dev/null", O_WRONLY | O_CLOEXEC);
    dup2(quiet, STDERR_FILENO);
    _exit(RunWorkerProcess(
        {}, [&](const EngineOptions&, const std::function<void()>& met) {
          if (has_met) met();
          EXPECT_EQ(write(begun[1], "", 1), 1);
          absl::SleepFor(absl::Seconds(seconds));
          return absl::OkStatus();
        }));
  }
  char byte = 0;
  EXPECT_EQ(read(begun[0], &byte, 1), 1);
  close(begun[0]);
  close(begun[1]);
  const absl::Time start = absl::Now();
  kill(pid, SIGTERM);
  int ended = 0;
  waitpid(pid, &ended, 0);
  *exit_status = WIFEXITED(ended) ? WEXITSTATUS(ended) : -1;
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

// Runs a daemon whose other rank ends at once. Meanwhile `start` loads the
// engine. Checks the exit status and returns the log.
std::string LogOfAStartWithoutARank(const EngineStarter& start) {
  const std::string log =
      absl::StrCat(::testing::TempDir(), "/weft_daemon_log_", getpid());
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(open(log.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600),
         STDERR_FILENO);
    World world;
    // The other rank is this program, without a test to run.
    std::string program = "rank";
    std::string no_test = "--gtest_filter=-*";
    char* argv[] = {program.data(), no_test.data(), nullptr};
    absl::StatusOr<LocalRanks> others = LocalRanks::Spawn(argv, 2, &world);
    Settings settings;
    settings.server.listen = "127.0.0.1:0";
    settings.server.metrics_listen = "";
    alarm(30);  // Kills a daemon that does not exit, so that the test fails.
    _exit(RunDaemon(settings, start, &*others));
  }
  int ended = 0;
  waitpid(pid, &ended, 0);
  EXPECT_TRUE(WIFEXITED(ended));
  EXPECT_EQ(WEXITSTATUS(ended), 1);
  std::ifstream file(log);
  std::string text(std::istreambuf_iterator<char>(file), {});
  std::filesystem::remove(log);
  return text;
}

// Returns a starter that reports a damaged file after `seconds`.
EngineStarter FailAfter(double seconds) {
  return [seconds](
             const EngineOptions&,
             prometheus::Registry*) -> absl::StatusOr<std::unique_ptr<Engine>> {
    absl::SleepFor(absl::Seconds(seconds));
    return absl::DataLossError("rank 1: a damaged file");
  };
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
  const auto start =
      [](const EngineOptions&,
         prometheus::Registry*) -> absl::StatusOr<std::unique_ptr<Engine>> {
    // Waits until the daemon has noticed that the rank ended. From then on the
    // process has no more children, so waitid fails.
    siginfo_t info;
    while (waitid(P_ALL, 0, &info, WEXITED | WNOWAIT) == 0) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    return std::make_unique<CannedEngine>();
  };
  EXPECT_THAT(LogOfAStartWithoutARank(start),
              AllOf(HasSubstr("exited with status 0"),
                    Not(HasSubstr("engine started"))));
}

TEST(DaemonTest, TakenPortEndsTheDaemon) {
  Settings settings;
  settings.server.listen = "192.0.2.1:1";  // No machine has this address.
  settings.server.metrics_listen = "";
  const pid_t pid = fork();
  if (pid == 0) {
    LocalRanks none;
    _exit(RunDaemon(settings, StartCanned, &none));
  }
  int status = 0;
  waitpid(pid, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 1);
}

}  // namespace
}  // namespace weft
