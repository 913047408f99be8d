// Writes gRPC's own messages, such as failed handshakes, to Weft's log.
#ifndef WEFT_SERVER_GRPC_GRPC_LOG_H_
#define WEFT_SERVER_GRPC_GRPC_LOG_H_

namespace weft::server {

// From now on, logs gRPC's messages as events named "grpc". Errors have level
// warning, and other messages have level debug. Writes at most about ten lines
// a second, so that failed handshakes cannot fill the disk.
void TakeOverGrpcLog();

}  // namespace weft::server

#endif  // WEFT_SERVER_GRPC_GRPC_LOG_H_
