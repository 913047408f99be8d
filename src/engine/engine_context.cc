#include "src/engine/engine_context.h"

#include "src/engine/adapters/adapter_table.h"

namespace weft::engine {

void EngineContext::Publish(AdapterKey adapter) const {
  dispatcher.adapters().Publish(adapter, adapters.Facts(adapter));
}

}  // namespace weft::engine
