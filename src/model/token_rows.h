// Maps tokens to rows of a rank's part of the embedding.
//
// Legend: T packed tokens.
#ifndef WEFT_SRC_MODEL_TOKEN_ROWS_H_
#define WEFT_SRC_MODEL_TOKEN_ROWS_H_

#include <ATen/core/Tensor.h>

#include "src/parallel/shard.h"

namespace weft::model {

// The row of each token in the rank's part of the embedding. `foreign_T1` marks
// tokens whose embedding is on another rank. Such a token has row 0, and the
// caller discards its result. `foreign_T1` is undefined if the rank has the
// whole vocabulary.
struct TokenRows {
  at::Tensor rows_T;
  at::Tensor foreign_T1;
};

// Returns the rows of the tokens, and sets foreign_T1. `own` is the rank's part
// of the vocabulary.
[[nodiscard]] TokenRows RowsOfTokens(const at::Tensor& tokens_T,
                                     const parallel::Range& own);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_TOKEN_ROWS_H_
