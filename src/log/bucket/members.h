// Chooses which process of a state in a store draws the next samples from a
// checkpoint, which any of them can: the fewer tokens it has to sample, the
// likelier.
//
// A process knows its own tokens, and of the others what their manifests said
// some seconds ago. So it adds what it has sent to each since. For the same
// reason it draws lots and does not take the least: then all processes would
// choose the same one until its next sign of life, and short samples would go
// now here, now there. Its own tokens are counted as those of the others, if
// that is more than it has now: else it would keep all that ends at once.
// It knows some of the others, the owners of the logs that follow its own:
// enough to choose from, and few enough to look at.
#ifndef WEFT_SRC_LOG_BUCKET_MEMBERS_H_
#define WEFT_SRC_LOG_BUCKET_MEMBERS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "src/base/observe/metrics.h"
#include "src/base/threads/mutex.h"
#include "src/base/threads/worker.h"
#include "src/log/bucket/sample_load.h"
#include "src/store/object_store.h"

namespace weft::log {

// A process that may sample, as the store says.
struct Member {
  std::string etag;     // Another one shows that the process lives.
  std::string address;  // HOST:PORT at which clients reach it.
  std::optional<uint64_t> queued_tokens;  // None: it takes no samples.
};

// Threads: one at a time.
class MemberChoice {
 public:
  // A process draws so many samples about as fast as one.
  static constexpr uint64_t kBatch = 16;

  // Notes what a look at `now` (SteadyNow()) has found under a key.
  void See(const std::string& key, const Member& member, absl::Time now);
  // Notes that this process had so many tokens at a look.
  void SeeOwn(std::optional<uint64_t> own);

  // Returns the address of the process that is to draw about `tokens`, and
  // counts them for it; empty for this process, which has `own` tokens now, or
  // takes no samples. `lot`, in [0, 1), decides: a process has a share of the
  // lots as its number of tokens, with those of kBatch such samples, is small,
  // squared. One whose ETag did not change between two looks that are
  // kOwnerPatience apart counts as dead.
  std::string Choose(const std::string& self, std::optional<uint64_t> own,
                     uint64_t tokens, double lot);

 private:
  struct Seen {
    Member member;
    absl::Time since;   // The first look with this ETag.
    absl::Time looked;  // The latest look.
    // What was sent there since the latest look, and before it. What was sent
    // since the look before a new ETag may not be in the new figure.
    uint64_t sent = 0;
    uint64_t sent_before = 0;

    bool MaySample(const std::string& self) const;
    uint64_t tokens() const {
      return member.queued_tokens.value_or(0) + sent_before + sent;
    }
  };
  std::map<std::string, Seen> seen_;
  Seen own_;
};

// Threads: any.
class Members {
 public:
  // The process owns log `own` of `num_logs`, and has this address. The
  // pointers outlive the object.
  Members(store::ObjectStore* store, int own, int num_logs, std::string self,
          const SampleLoad* load, prometheus::Registry* registry);

  // Returns HOST:PORT of the process that is to draw the next samples from a
  // checkpoint; empty for this one. Never waits for the store: it has the
  // others looked at, at most once in kLookAgain.
  std::string Choose() ABSL_LOCKS_EXCLUDED(mu_);

  // Ends the thread.
  void Stop() {
    stopped_ = true;
    looks_.Discard();
  }

 private:
  void Look() ABSL_LOCKS_EXCLUDED(mu_);

  store::ObjectStore& store_;
  const int own_;
  const int num_logs_;
  const std::string self_;
  const SampleLoad& load_;
  prometheus::Counter& sent_;
  Mutex mu_;
  MemberChoice choice_ ABSL_GUARDED_BY(mu_);
  std::mt19937 lots_ ABSL_GUARDED_BY(mu_){std::random_device()()};
  absl::Time next_look_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  bool looking_ ABSL_GUARDED_BY(mu_) = false;
  std::atomic<bool> stopped_{false};
  Worker looks_;  // Ends before what it uses.
};

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_BUCKET_MEMBERS_H_
