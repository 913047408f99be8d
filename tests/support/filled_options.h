// Gives the options of a dispatcher for tests that set only some of them.
#ifndef WEFT_TESTS_SUPPORT_FILLED_OPTIONS_H_
#define WEFT_TESTS_SUPPORT_FILLED_OPTIONS_H_

#include <cstdint>

#include "src/dispatch/state.h"

namespace weft::dispatch {

// Returns `options` with limits that tests do not reach in place of zeros.
inline Options Filled(Options options) {
  const auto fill = [](auto& value, auto other) {
    if (value == 0) value = other;
  };
  fill(options.scheduler.max_batch_tokens, 8192);
  fill(options.scheduler.sampling_share, 0.5);
  fill(options.residency.max_resident, 64);
  fill(options.max_adapters, 1024);
  fill(options.max_adapters_per_tenant, 1024);
  fill(options.max_stored_reply_bytes, int64_t{256} << 20);
  return options;
}

}  // namespace weft::dispatch

#endif  // WEFT_TESTS_SUPPORT_FILLED_OPTIONS_H_
