#include "src/model/token_rows.h"

#include <ATen/ATen.h>

namespace weft::model {

TokenRows RowsOfTokens(const at::Tensor& tokens_T, const parallel::Range& own) {
  const at::Tensor foreign_T =
      tokens_T.lt(own.begin).logical_or_(tokens_T.ge(own.end));
  return {.rows_T = (tokens_T - own.begin).masked_fill_(foreign_T, 0),
          .foreign_T1 = foreign_T.unsqueeze(1)};
}

}  // namespace weft::model
