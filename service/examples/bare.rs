//! The same server without a decision, for `service/bench/run.sh`: it reads the same questions, and
//! gives answers of the same length.

use std::env;

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
use tonic::{Request, Response, Status};

struct Bare;

#[tonic::async_trait]
impl RateLimitService for Bare {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let status = DescriptorStatus {
            code: Code::Ok.into(),
            current_limit: Some(RateLimit { name: "steady".to_owned(), requests_per_unit: 1_000_000, unit: 1 }),
            limit_remaining: 999_000,
            duration_until_reset: Some(Duration { seconds: 0, nanos: 999_999_000 }),
            ..DescriptorStatus::default()
        };
        let statuses = request.into_inner().descriptors.iter().map(|_| status.clone()).collect();
        Ok(Response::new(RateLimitResponse { overall_code: 1, statuses, ..RateLimitResponse::default() }))
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
    let [http, grpc] = ["HTTP", "GRPC"].map(|name| env::var(name).unwrap_or_else(|_| "127.0.0.1:0".to_owned()));
    let (http, grpc) = (tokio::net::TcpListener::bind(http).await?, tokio::net::TcpListener::bind(grpc).await?);
    let bare = tonic::service::Routes::new(RateLimitServiceServer::new(Bare)).into_axum_router();
    let checks = Router::new().route("/check", post(check));
    tokio::select! {
        served = async { axum::serve(http, checks).await } => Ok(served?),
        served = async { axum::serve(grpc, bare).await } => Ok(served?),
    }
}
