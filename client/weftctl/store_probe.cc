#include "client/weftctl/store_probe.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <random>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/status_macros.h"
#include "src/store/open_store.h"
#include "src/store/s3_store.h"

namespace weft::client::weftctl {
namespace {

using store::ListedObject;
using store::Object;
using store::ObjectStore;
using store::S3Options;
using store::S3Store;

constexpr int kWriters = 8;
constexpr int kLeastRounds = 3;
constexpr uint64_t kMaxBytes = 64 << 20;
// The body of a writer that is stopped or killed takes half a second, so a
// fifth of a second after its start it is in the middle.
constexpr size_t kSlowBytes = 4 << 20;
constexpr uint64_t kSlowBytesPerSecond = 8 << 20;
constexpr absl::Duration kMiddle = absl::Milliseconds(200);

// How a write ended, for the writer.
enum Outcome { kWon = 0, kRefused = 1, kUnknown = 2 };

Outcome Create(ObjectStore* store, const std::string& key,
               const std::string& bytes) {
  const absl::Status status = store->Create(key, {bytes}).status();
  if (status.ok()) return kWon;
  if (!absl::IsAlreadyExists(status)) return kUnknown;
  // The answer to an earlier attempt may have been lost.
  const absl::StatusOr<Object> object = store->Get(key, kMaxBytes);
  return object.ok() && object->bytes == bytes ? kWon : kRefused;
}

class Probe {
 public:
  Probe(S3Options options, absl::Duration duration)
      : options_(std::move(options)), duration_(duration) {
    std::random_device random;
    root_ =
        absl::StrCat("probe/", absl::Hex(random()), absl::Hex(random()), "/");
  }

  absl::StatusOr<std::vector<ProbeResult>> Run() {
    S3Store store(options_);
    WEFT_RETURN_IF_ERROR(CheckConditions(&store));
    // These start processes, and the later checks threads.
    Add("a writer stops in its body, another wins",
        Repeat(
            [&](const std::string& key) { return Interrupt(key, SIGSTOP); }));
    Add("a writer is killed in its body", Repeat([&](const std::string& key) {
          return Interrupt(key, SIGKILL);
        }));
    Add(absl::StrCat(kWriters, " writers create one object"),
        Repeat([&](const std::string& key) { return Race(&store, key); }));
    Add(absl::StrCat(kWriters, " writers increment a counter"), Count(&store));
    Add("LIST and GET after each write",
        Repeat([&](const std::string& key) { return Look(&store, key); }));
    Measure(&store);
    WEFT_RETURN_IF_ERROR(CleanUp(&store));
    return std::move(results_);
  }

 private:
  // What went wrong, or "".
  using Check = std::function<std::string(const std::string& key)>;

  void Add(std::string check, std::string problem,
           const char* what = "rounds") {
    const bool ok = problem.empty();
    results_.push_back({std::move(check), ok,
                        ok ? absl::StrCat(rounds_, " ", what) : problem});
  }

  // Runs the check with new keys for a part of the time.
  std::string Repeat(const Check& check) {
    const absl::Time end = SteadyNow() + duration_ / 4;
    for (rounds_ = 0; rounds_ < kLeastRounds || SteadyNow() < end; ++rounds_) {
      const std::string problem =
          check(absl::StrCat(root_, results_.size(), "/", rounds_));
      if (!problem.empty()) {
        return absl::StrCat("round ", rounds_, ": ", problem);
      }
    }
    return "";
  }

  // Starts a process that creates the object, slowly. Its exit status is the
  // outcome.
  pid_t StartSlowWriter(const std::string& key) const {
    const pid_t pid = ::fork();
    if (pid != 0) return pid;
    S3Options slow = options_;
    slow.max_upload_bytes_per_second = kSlowBytesPerSecond;
    S3Store store(slow);
    ::_exit(Create(&store, key, std::string(kSlowBytes, 's')));
  }

  // Interrupts a slow writer in the middle of its body, and creates the object.
  std::string Interrupt(const std::string& key, int signal) const {
    const pid_t pid = StartSlowWriter(key);
    if (pid < 0) return "no process was started";
    absl::SleepFor(kMiddle);
    ::kill(pid, signal);
    S3Store store(options_);
    const Outcome own = Create(&store, key, "winner");
    ::kill(pid, SIGCONT);
    int status = 0;
    ::waitpid(pid, &status, 0);
    const bool other_won = WIFEXITED(status) && WEXITSTATUS(status) == kWon;
    if (own == kUnknown) return "the store does not answer";
    if (own == kWon && other_won) return "both writers succeeded";
    const absl::StatusOr<Object> object = store.Get(key, kMaxBytes);
    if (!object.ok()) return std::string(object.status().message());
    const std::string& bytes = object->bytes;
    if (bytes != "winner" && bytes != std::string(kSlowBytes, 's')) {
      return "the object is torn";
    }
    return (bytes == "winner") == (own == kWon)
               ? ""
               : "the object is not that of the writer that succeeded";
  }

  // Runs `body` in as many threads as there are writers.
  static void InThreads(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    threads.reserve(kWriters);
    for (int i = 0; i < kWriters; ++i) threads.emplace_back(body, i);
    for (std::thread& thread : threads) thread.join();
  }

  static std::string Race(S3Store* store, const std::string& key) {
    std::array<Outcome, kWriters> outcomes;
    const auto bytes = [](int i) {
      return std::string(1000, static_cast<char>('a' + i));
    };
    InThreads([&](int i) { outcomes[i] = Create(store, key, bytes(i)); });
    const auto won = std::count(outcomes.begin(), outcomes.end(), kWon);
    const auto unknown = std::count(outcomes.begin(), outcomes.end(), kUnknown);
    if (won > 1) return absl::StrCat(won, " writers succeeded");
    const absl::StatusOr<Object> object = store->Get(key, kMaxBytes);
    if (!object.ok()) return std::string(object.status().message());
    for (int i = 0; i < kWriters; ++i) {
      if (object->bytes != bytes(i)) continue;
      if (outcomes[i] == kWon || (won == 0 && unknown > 0)) return "";
      return "the object is not that of the writer that succeeded";
    }
    return "the object is torn";
  }

  // The count is the first word. The other words make versions differ.
  std::string Count(S3Store* store) {
    const std::string key = absl::StrCat(root_, "counter");
    if (Create(store, key, "0") != kWon) return "the store does not answer";
    std::atomic<int> swaps = 0, unknown = 0;
    const absl::Time end = SteadyNow() + duration_ / 4;
    InThreads([&](int i) {
      for (int step = 0; SteadyNow() < end; ++step) {
        const absl::StatusOr<Object> now = store->Get(key, kMaxBytes);
        int count = 0;
        if (!now.ok() ||
            !absl::SimpleAtoi(now->bytes.substr(0, now->bytes.find(' ')),
                              &count)) {
          continue;
        }
        const std::string next = absl::StrCat(count + 1, " ", i, " ", step);
        const absl::Status status = store->Swap(key, next, now->etag).status();
        if (status.ok()) {
          ++swaps;
        } else if (!absl::IsAborted(status)) {
          ++unknown;
        }
      }
    });
    const absl::StatusOr<Object> last = store->Get(key, kMaxBytes);
    if (!last.ok()) return std::string(last.status().message());
    int count = 0;
    const bool number =
        absl::SimpleAtoi(last->bytes.substr(0, last->bytes.find(' ')), &count);
    rounds_ = swaps;
    if (!number || count < swaps || count > swaps + unknown) {
      return absl::StrCat(count, " after ", swaps.load(), " swaps");
    }
    return "";
  }

  // Writes, replaces and deletes an object. Each must be seen at once.
  std::string Look(S3Store* store, const std::string& key) const {
    S3Store other(options_);
    const auto listed = [&](const std::string& etag) {
      const auto objects = other.List(key, "", 10);
      if (!objects.ok()) return false;
      return etag.empty() ? objects->empty()
                          : objects->size() == 1 && (*objects)[0].etag == etag;
    };
    const absl::StatusOr<std::string> first = store->Create(key, {"1"});
    if (!first.ok()) return std::string(first.status().message());
    if (!listed(*first)) return "LIST does not show what was written";
    const absl::StatusOr<std::string> next = store->Swap(key, "2", *first);
    if (!next.ok()) return std::string(next.status().message());
    if (!listed(*next)) return "LIST shows what was replaced";
    const absl::StatusOr<Object> object = other.Get(key, kMaxBytes);
    if (!object.ok() || object->bytes != "2") return "GET is not exact";
    const absl::Status status = store->Delete(key);
    if (!status.ok()) return std::string(status.message());
    if (!listed("")) return "LIST shows what was deleted";
    return absl::IsNotFound(other.Get(key, kMaxBytes).status())
               ? ""
               : "GET returns what was deleted";
  }

  void Measure(S3Store* store) {
    constexpr int kTimes = 30;
    std::vector<double> put, get, list;
    const auto time = [](const std::function<bool()>& call,
                         std::vector<double>* times) {
      const absl::Time start = SteadyNow();
      if (call()) {
        times->push_back(absl::ToDoubleMilliseconds(SteadyNow() - start));
      }
    };
    const std::string bytes(1000, 'x');
    for (int i = 0; i < kTimes; ++i) {
      const std::string key = absl::StrCat(root_, "time/", i);
      time([&] { return store->Create(key, {bytes}).ok(); }, &put);
      time([&] { return store->Get(key, kMaxBytes).ok(); }, &get);
      time([&] { return store->List(root_ + "time/", "", 100).ok(); }, &list);
    }
    const auto add = [&](const char* what, std::vector<double>* times) {
      std::sort(times->begin(), times->end());
      results_.push_back(
          {what, times->size() == kTimes,
           times->empty()
               ? "all failed"
               : absl::StrFormat("%.1f ms (median of %d)",
                                 (*times)[times->size() / 2], times->size())});
    };
    add("PUT of 1 kB", &put);
    add("GET of 1 kB", &get);
    add("LIST", &list);
  }

  absl::Status CleanUp(S3Store* store) const {
    WEFT_ASSIGN_OR_RETURN(const std::vector<ListedObject> objects,
                          store->List(root_, "", SIZE_MAX));
    for (const ListedObject& object : objects) {
      WEFT_RETURN_IF_ERROR(store->Delete(object.key));
    }
    return absl::OkStatus();
  }

  const S3Options options_;
  const absl::Duration duration_;
  std::string root_;
  int rounds_ = 0;
  std::vector<ProbeResult> results_;
};

}  // namespace

absl::StatusOr<std::vector<ProbeResult>> ProbeStore(
    const store::S3Options& options, absl::Duration duration) {
  return Probe(options, duration).Run();
}

}  // namespace weft::client::weftctl
