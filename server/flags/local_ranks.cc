#include "server/flags/local_ranks.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/status_macros.h"

namespace weft::server {
namespace {

constexpr absl::Duration kEndGrace = absl::Seconds(10);

absl::Status SystemError(const char* what) {
  return absl::UnavailableError(absl::StrCat("starting the other ranks: ", what,
                                             ": ", std::strerror(errno)));
}

// Binds a free port of the loopback interface, at which the ranks will meet.
// The socket stays open, so that no other program takes the port before they
// meet.
absl::Status BindLoopback(World* world) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return SystemError("socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(fd, generic, size) != 0 || getsockname(fd, generic, &size) != 0) {
    const absl::Status status = SystemError("bind");
    close(fd);
    return status;
  }
  world->host = "127.0.0.1";
  world->port = ntohs(address.sin_port);
  world->listen_fd = fd;
  return absl::OkStatus();
}

int64_t CountThreads() {
  std::error_code error;
  const std::filesystem::directory_iterator tasks("/proc/self/task", error);
  return std::distance(begin(tasks), end(tasks));
}

// Checks that a fork copies all threads of this process. What another thread
// holds would stay locked in the ranks for ever. A thread that has been joined
// is still listed for a moment.
absl::Status CheckOneThread() {
  const absl::Time limit = SteadyNow() + absl::Seconds(1);
  while (CountThreads() > 1) {
    if (SteadyNow() > limit) {
      return absl::UnavailableError(absl::StrCat(
          "starting the other ranks: libraries of this process have started ",
          CountThreads() - 1, " threads, perhaps one in LD_PRELOAD. Unload it,",
          " or start the ranks with torchrun."));
    }
    absl::SleepFor(absl::Milliseconds(1));
  }
  return absl::OkStatus();
}

// Makes the forked child `rank`, which ends with its parent.
void BecomeRank(int rank, pid_t parent, World* world) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  close(std::exchange(world->listen_fd, -1));
  world->rank = world->local_rank = rank;
}

std::string HowItEnded(int status) {
  return WIFSIGNALED(status)
             ? absl::StrCat("was ended by signal ", WTERMSIG(status))
             : absl::StrCat("exited with status ", WEXITSTATUS(status));
}

}  // namespace

absl::StatusOr<LocalRanks> LocalRanks::Spawn(int size, World* world) {
  world->size = world->local_size = size;
  WEFT_RETURN_IF_ERROR(CheckOneThread());
  WEFT_RETURN_IF_ERROR(BindLoopback(world));
  LocalRanks ranks;
  const pid_t parent = getpid();
  for (int rank = 1; rank < size; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) return SystemError("fork");
    if (pid == 0) {
      ranks.processes_.clear();  // They are not its children.
      BecomeRank(rank, parent, world);
      return ranks;
    }
    ranks.processes_.push_back({.rank = rank, .pid = pid});
  }
  return ranks;
}

LocalRanks::LocalRanks(LocalRanks&& other) noexcept
    : processes_(std::exchange(other.processes_, {})) {}

LocalRanks& LocalRanks::operator=(LocalRanks&& other) noexcept {
  std::swap(processes_, other.processes_);
  return *this;
}

LocalRanks::~LocalRanks() {
  const absl::Time limit = SteadyNow() + kEndGrace;
  for (const Process& process : processes_) {
    int status = 0;
    while (waitpid(process.pid, &status, WNOHANG) == 0 && SteadyNow() < limit) {
      absl::SleepFor(absl::Milliseconds(10));
    }
  }
  Kill();
}

void LocalRanks::Kill() {
  // Sends no signal to a process that waitpid reports as ended, because another
  // process may have its id now.
  for (const Process& process : std::exchange(processes_, {})) {
    int status = 0;
    if (waitpid(process.pid, &status, WNOHANG) != 0) continue;
    kill(process.pid, SIGKILL);
  }
}

absl::Status LocalRanks::Check() {
  for (auto process = processes_.begin(); process != processes_.end();
       ++process) {
    int status = 0;
    if (waitpid(process->pid, &status, WNOHANG) == 0) continue;
    const Process ended = *process;
    processes_.erase(process);
    return absl::UnavailableError(absl::StrCat("rank ", ended.rank,
                                               " (process ", ended.pid, ") ",
                                               HowItEnded(status)));
  }
  return absl::OkStatus();
}

}  // namespace weft::server
