#include "server/http/metrics_server.h"

#include <utility>

#include "absl/strings/string_view.h"
#include "prometheus/text_serializer.h"
#include "src/base/status_macros.h"

namespace weft::server {
namespace {

HttpReply Text(int status, std::string text) {
  return {.status = status,
          .content_type = "text/plain; version=0.0.4; charset=utf-8",
          .body = std::move(text)};
}

HttpReply HealthReply(bool good) {
  return good ? Text(200, "SERVING\n") : Text(503, "NOT_SERVING\n");
}

std::string Page(
    const std::vector<std::shared_ptr<prometheus::Collectable>>& collectables) {
  std::vector<prometheus::MetricFamily> families;
  for (const auto& collectable : collectables) {
    for (prometheus::MetricFamily& family : collectable->Collect()) {
      families.push_back(std::move(family));
    }
  }
  return prometheus::TextSerializer().Serialize(families);
}

HttpReply Answer(const MetricsSources& sources, const HttpRequest& request) {
  if (request.method != "GET") return Text(405, "only GET\n");
  const absl::string_view target = request.target;
  const absl::string_view path = target.substr(0, target.find('?'));
  if (path == "/metrics") return Text(200, Page(sources.collectables));
  if (path == "/livez") return HealthReply(sources.live());
  if (path == "/readyz") return HealthReply(sources.ready());
  if (path == "/authorize") {
    const absl::StatusOr<std::string> owner = sources.authorize(request);
    if (!owner.ok()) {
      return Text(401, std::string(owner.status().message()) + "\n");
    }
    HttpReply reply{.status = 204};
    if (!owner->empty()) reply.headers.emplace_back(kOwnerHeader, *owner);
    return reply;
  }
  return Text(404, "there is /metrics, /livez, /readyz and /authorize\n");
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> StartMetricsServer(
    const std::string& listen, const HttpOptions& options,
    MetricsSources sources) {
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<HttpServer> server,
                        HttpServer::Bind("metrics-listen", listen, options));
  const auto shared =
      std::make_shared<const MetricsSources>(std::move(sources));
  server->Start([shared](const HttpRequest&) {
    return Admission{
        .serve = [shared](const HttpRequest& request, const Respond& respond) {
          respond(Answer(*shared, request));
        }};
  });
  return server;
}

}  // namespace weft::server
