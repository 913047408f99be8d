// Gives the options with which every rank runs the output head.
#ifndef WEFT_SRC_ENGINE_DECODE_HEAD_OPTIONS_H_
#define WEFT_SRC_ENGINE_DECODE_HEAD_OPTIONS_H_

#include "src/base/options/options.h"
#include "src/loss/fused_head.h"
#include "src/model/decoder.h"

namespace weft::engine {

inline loss::HeadOptions HeadOptionsOf(const EngineOptions& options,
                                       const model::Decoder& decoder) {
  return {.chunk_rows = options.loss_chunk_size,
          .softcap = decoder.config().final_softcap,
          .shard = {.group = decoder.tensor_group(),
                    .vocab = decoder.config().vocab}};
}

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_DECODE_HEAD_OPTIONS_H_
