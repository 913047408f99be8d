// A queue of samples that wait in the front until the engine takes them. A
// client of the SDK has up to 2,000 samples under way. Owners take turns.
#ifndef WEFT_SERVER_TINKER_SAMPLE_QUEUE_H_
#define WEFT_SERVER_TINKER_SAMPLE_QUEUE_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "server/call.h"
#include "src/request/reply.h"
#include "src/request/sample.h"
#include "weft/v1/sampling.pb.h"

namespace weft::tinker {

struct WaitingSample {
  std::string id;
  CallOrigin origin;
  v1::SampleRequest request;
  Callback<SampleResult> done;
  std::shared_ptr<void> reserved;  // The sample's bytes in Front::waiting.
};

// Threads: the front's.
class SampleQueue {
 public:
  // Adds a sample behind the other samples of its owner.
  void Add(const std::string& owner, WaitingSample sample);

  // Calls `start` with the first sample of each owner in turn, again and again.
  // If `start` returns true, the sample leaves the queue. If `start` returns
  // false, the samples of this owner wait until the next call of Advance.
  // Returns true if samples still wait at the end. A call of Advance within
  // `start` does nothing and returns false.
  bool Advance(const std::function<bool(const std::string& owner,
                                        const WaitingSample& sample)>& start);

  // Removes a sample. Returns false if the queue does not have it.
  bool Remove(const std::string& owner, const std::string& id);

 private:
  // The samples by owner. An owner without samples has no entry.
  std::map<std::string, std::deque<WaitingSample>> owners_;
  std::string last_;  // The owner that had the last turn.
  bool advances_ = false;
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_SAMPLE_QUEUE_H_
