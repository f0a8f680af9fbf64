//! The same server without a decision, and with one by the layer in this process, for
//! `service/bench/run.sh`: it reads the same questions, and gives answers of the same length.

use std::{env, net::Ipv4Addr};

use axum::{Json, Router, http::StatusCode, routing::post};
use envoy_types::pb::{
    envoy::service::ratelimit::v3::{
        RateLimitRequest, RateLimitResponse,
        rate_limit_response::{Code, DescriptorStatus, RateLimit},
        rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
    },
    google::protobuf::Duration,
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, task::JoinSet};
use tonic::{Request, Response, Status};
use tower_sliding_window::{
    Everyone, Limit, MemoryStore, RateLimitLayer, middleware::GrpcResponse,
};

struct Bare;

#[tonic::async_trait]
impl RateLimitService for Bare {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let status = DescriptorStatus {
            code: Code::Ok.into(),
            current_limit: Some(RateLimit {
                name: "steady".to_owned(),
                requests_per_unit: 1_000_000,
                unit: 1,
            }),
            limit_remaining: 999_000,
            duration_until_reset: Some(Duration {
                seconds: 0,
                nanos: 999_999_000,
            }),
            ..DescriptorStatus::default()
        };
        let statuses = request
            .into_inner()
            .descriptors
            .iter()
            .map(|_| status.clone())
            .collect();
        Ok(Response::new(RateLimitResponse {
            overall_code: 1,
            statuses,
            ..RateLimitResponse::default()
        }))
    }
}

async fn check(Json(question): Json<Value>) -> (StatusCode, Json<Value>) {
    let figures = json!({
        "allowed": true, "limit": question["limit"], "of": 1_000_000, "used": 1_000, "remaining": 999_000,
        "reset": 0.999_999, "retry": null, "currentCount": 1_000, "ttl": 1,
    });
    (StatusCode::OK, Json(figures))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let bare_checks = Router::new().route("/check", post(check));
    let bare_grpc =
        tonic::service::Routes::new(RateLimitServiceServer::new(Bare)).into_axum_router();
    let layer = RateLimitLayer::new(MemoryStore::new())
        .limit(Limit::per_second("steady", 1_000_000).by(Everyone));
    let guarded_checks = bare_checks.clone().layer(layer.clone());
    let guarded_grpc = bare_grpc.clone().layer(layer.respond_with(GrpcResponse));
    let mut servers = JoinSet::new();
    for (port, app) in
        (env::var("PORT")?.parse()?..).zip([bare_checks, bare_grpc, guarded_checks, guarded_grpc])
    {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
        servers.spawn(async { axum::serve(listener, app).await });
    }
    while let Some(served) = servers.join_next().await {
        served??;
    }
    Ok(())
}
