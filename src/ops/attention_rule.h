// Says how an attention layer scores keys, and which keys a query may see.
#ifndef WEFT_SRC_OPS_ATTENTION_RULE_H_
#define WEFT_SRC_OPS_ATTENTION_RULE_H_

#include <cstdint>

namespace weft::ops {

struct AttentionRule {
  double scale = 1;    // Factor of the products q . k.
  int64_t window = 0;  // A query sees its own token and the window - 1 tokens
                       // before it. 0: it sees all tokens before it.
  double softcap = 0;  // If > 0, a score x becomes softcap * tanh(x / softcap).
};

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_ATTENTION_RULE_H_
