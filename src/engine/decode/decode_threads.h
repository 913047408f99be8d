// The number of threads of decode iterations on a CPU.
//
// A decode iteration has hundreds of short loops, and in each all threads wait
// for the slowest. Beside other busy processes, the slowest is one that has
// lost its processor: two threads that share two processors with six other
// processes are six times slower than one. So an iteration runs on as many
// threads as there are processors for. Training has long loops, and gains from
// each thread. Its results depend on the number of threads in their last bits,
// and a replay must repeat them, so its number is fixed.
#ifndef WEFT_SRC_ENGINE_DECODE_DECODE_THREADS_H_
#define WEFT_SRC_ENGINE_DECODE_DECODE_THREADS_H_

#include <c10/util/FunctionRef.h>

#include <utility>

#include "absl/time/time.h"
#include "src/base/threads/processors.h"

namespace weft::engine {

// Threads: engine thread.
class DecodeThreads {
 public:
  // Without `adapts`, Run changes nothing.
  explicit DecodeThreads(bool adapts, ProcessorShare share = ProcessorShare())
      : adapts_(adapts), share_(std::move(share)) {}

  // Calls `run`. Meanwhile, the calling thread's loops have at most as many
  // threads as other processes leave processors.
  void Run(c10::function_ref<void()> run);

 private:
  int Choose(int most);

  const bool adapts_;
  ProcessorShare share_;
  absl::Time next_look_ = absl::InfinitePast();
  double left_ = 0;  // 0: unknown.
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_DECODE_DECODE_THREADS_H_
