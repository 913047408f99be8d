// The generated services, whose handlers get each request as bytes. gRPC would
// parse a request before any handler runs. Weft parses it itself, when it has
// measured it and charged the caller (CallRecord::Parse).
#ifndef WEFT_SERVER_RAW_SERVICES_H_
#define WEFT_SERVER_RAW_SERVICES_H_

#include "weft/v1/adapters.grpc.pb.h"
#include "weft/v1/sampling.grpc.pb.h"
#include "weft/v1/server.grpc.pb.h"
#include "weft/v1/training.grpc.pb.h"

namespace weft {

// Wraps `Service` in the generated class templates `Methods`.
template <typename Service, template <typename> class... Methods>
struct Wrapped {
  using Type = Service;
};
template <typename Service, template <typename> class First,
          template <typename> class... Rest>
struct Wrapped<Service, First, Rest...> {
  using Type = First<typename Wrapped<Service, Rest...>::Type>;
};

using RawTrainingService =
    Wrapped<v1::TrainingService::Service,
            v1::TrainingService::WithRawCallbackMethod_ForwardBackward,
            v1::TrainingService::WithRawCallbackMethod_Forward,
            v1::TrainingService::WithRawCallbackMethod_OptimStep>::Type;
using RawSamplingService =
    Wrapped<v1::SamplingService::Service,
            v1::SamplingService::WithRawCallbackMethod_Sample,
            v1::SamplingService::WithRawCallbackMethod_SampleStream>::Type;
using RawAdapterService =
    Wrapped<v1::AdapterService::Service,
            v1::AdapterService::WithRawCallbackMethod_CreateAdapter,
            v1::AdapterService::WithRawCallbackMethod_GetAdapter,
            v1::AdapterService::WithRawCallbackMethod_ListAdapters,
            v1::AdapterService::WithRawCallbackMethod_DeleteAdapter,
            v1::AdapterService::WithRawCallbackMethod_SaveCheckpoint,
            v1::AdapterService::WithRawCallbackMethod_LoadCheckpoint,
            v1::AdapterService::WithRawCallbackMethod_ListCheckpoints,
            v1::AdapterService::WithRawCallbackMethod_DeleteCheckpoint,
            v1::AdapterService::WithRawCallbackMethod_DownloadCheckpoint,
            v1::AdapterService::WithRawCallbackMethod_UploadCheckpoint,
            v1::AdapterService::WithRawCallbackMethod_PublishSnapshot,
            v1::AdapterService::WithRawCallbackMethod_ReleaseSnapshot,
            v1::AdapterService::WithRawCallbackMethod_ExportAdapter,
            v1::AdapterService::WithRawCallbackMethod_ImportAdapter>::Type;
using RawServerService =
    Wrapped<v1::ServerService::Service,
            v1::ServerService::WithRawCallbackMethod_GetInfo,
            v1::ServerService::WithRawCallbackMethod_Drain,
            v1::ServerService::WithRawCallbackMethod_Profile>::Type;

}  // namespace weft

#endif  // WEFT_SERVER_RAW_SERVICES_H_
