// Prefill: computes the keys and values of new prompts and of preempted
// sequences. Each pass through the model computes pieces of one or more
// sequences.
#ifndef WEFT_SRC_ENGINE_DECODE_SAMPLE_PREFILL_H_
#define WEFT_SRC_ENGINE_DECODE_SAMPLE_PREFILL_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "src/dispatch/fair_shares.h"
#include "src/engine/decode/sample_sequences.h"
#include "src/engine/decode/sample_state.h"
#include "src/engine/device/engine_probe.h"
#include "src/executor/executor.h"

namespace weft::engine {

// The tokens [begin, end) of a sequence, which one pass computes.
struct SamplePiece {
  SampleSequence* sequence = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t num_draws = 0;

  // Returns whether this piece draws the first tokens of the prompt's samples.
  bool ends_prompt() const;
};

// Threads: engine thread only.
class SamplePrefill {
 public:
  // One pass computes at most `max_tokens` tokens, and 64 prompt_targets for
  // each of these, unless its first token alone has more. It draws at most
  // `max_draws` tokens, unless its first piece alone draws more. `executor`,
  // `sequences` and `probe` outlive the object.
  SamplePrefill(executor::Executor* executor, SampleSequences* sequences,
                EngineProbe* probe, int64_t max_tokens, int64_t max_draws,
                std::map<std::string, int64_t> weights)
      : executor_(*executor),
        sequences_(*sequences),
        probe_(probe),
        max_tokens_(max_tokens),
        max_draws_(max_draws),
        shares_(std::move(weights)) {}

  // Gives pages to waiting sequences and runs one pass with the next pieces of
  // sequences that have pages. Tenants share prefill in proportion to their
  // `weights`, by what of a pass they take (ShareOf). Throws what Executor
  // throws.
  void Run();

 private:
  // Returns the sequences that wait for prefill, in the order in which tenants,
  // and the adapters of a tenant, have their turns. Those of one adapter are in
  // order of age.
  std::vector<SampleSequence*> InTurn();
  // Returns the tokens to charge for a piece: as much of a pass as it takes of
  // what is scarcest, which is tokens, draws or keys.
  int64_t ShareOf(const SamplePiece& piece) const;
  // Returns the sequence's next piece within the budgets of tokens and draws;
  // nothing if there is none. A first row may exceed the budget.
  std::optional<SamplePiece> NextPiece(SampleSequence& sequence, int64_t budget,
                                       int64_t draw_budget) const;
  std::vector<SamplePiece> Plan();
  void RunPieces(const std::vector<SamplePiece>& pieces);
  // Gives the output to the jobs.
  void Store(const std::vector<SamplePiece>& pieces,
             executor::CacheOutput output);

  executor::Executor& executor_;
  SampleSequences& sequences_;
  EngineProbe* const probe_;
  const int64_t max_tokens_;
  const int64_t max_draws_;
  dispatch::FairShares shares_;
  std::set<AdapterKey> flows_;  // Those that shares_ has.
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_DECODE_SAMPLE_PREFILL_H_
