// Brings samples from the dispatcher to the decode loop, and results back to
// the dispatcher.
#ifndef WEFT_SRC_ENGINE_DECODE_SAMPLE_RUNNER_H_
#define WEFT_SRC_ENGINE_DECODE_SAMPLE_RUNNER_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "src/engine/decode/sample_loop.h"
#include "src/engine/engine_context.h"

namespace weft::engine {

// Threads: engine thread.
class SampleRunner {
 public:
  // `context` and `loop` outlive the runner.
  SampleRunner(const EngineContext* context, SampleLoop* loop)
      : context_(*context), loop_(*loop) {}

  // Admits the samples for which there is room, then runs one decode iteration.
  // An error fails all samples that are in prefill or decode.
  void Decode();
  // Ends those of the samples that are in prefill or decode with the error.
  void End(const std::vector<uint64_t>& ids, const absl::Status& status);

 private:
  void Admit();

  const EngineContext& context_;
  SampleLoop& loop_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_DECODE_SAMPLE_RUNNER_H_
