#include "src/request/adapter.h"

namespace weft {

std::vector<TargetModule> DefaultTargetModules() {
  return {TargetModule::kQProj,    TargetModule::kKProj,
          TargetModule::kVProj,    TargetModule::kOProj,
          TargetModule::kGateProj, TargetModule::kUpProj,
          TargetModule::kDownProj};
}

const char* TargetModuleName(TargetModule module) {
  switch (module) {
    case TargetModule::kQProj:
      return "q_proj";
    case TargetModule::kKProj:
      return "k_proj";
    case TargetModule::kVProj:
      return "v_proj";
    case TargetModule::kOProj:
      return "o_proj";
    case TargetModule::kGateProj:
      return "gate_proj";
    case TargetModule::kUpProj:
      return "up_proj";
    case TargetModule::kDownProj:
      return "down_proj";
    case TargetModule::kLmHead:
      return "lm_head";
  }
  return "unknown";
}

}  // namespace weft
