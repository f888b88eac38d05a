//! Counts the requests that the client repeats by itself.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};

use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use prometheus::IntCounter;

/// Failed requests that are remembered; more are in flight nowhere.
const FAILED_MAX: usize = 1024;

/// Makes clients that count.
#[derive(Debug)]
pub(super) struct CountingConnector(pub(super) IntCounter);

#[derive(Debug)]
struct Counting {
    client: HttpClient,
    retries: IntCounter,
    /// Fingerprints of requests that failed in a way that is worth another attempt. The client
    /// repeats a request as it was signed, so the signature tells it from any other.
    failed: Mutex<HashSet<u64>>,
}

impl HttpConnector for CountingConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = super::patience::limit(ReqwestConnector::default().connect(options)?);
        let retries = self.0.clone();
        Ok(HttpClient::new(Counting { client, retries, failed: Mutex::default() }))
    }
}

impl HttpService for Counting {
    fn call<'life0, 'async_trait>(
        &'life0 self, request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'async_trait>>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(async move {
            let fingerprint = fingerprint(&request);
            if self.lock().remove(&fingerprint) {
                self.retries.inc();
            }
            let outcome = self.client.execute(request).await;
            let is_failed = outcome.as_ref().map_or(true, |response| {
                response.status().is_server_error()
                    || [408, 429].contains(&response.status().as_u16())
            });
            if is_failed {
                let mut failed = self.lock();
                if failed.len() >= FAILED_MAX {
                    failed.clear();
                }
                failed.insert(fingerprint);
            }
            outcome
        })
    }
}

impl Counting {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashSet<u64>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn fingerprint(request: &HttpRequest) -> u64 {
    let mut hasher = DefaultHasher::new();
    request.method().hash(&mut hasher);
    request.uri().hash(&mut hasher);
    request.headers().get("authorization").hash(&mut hasher);
    hasher.finish()
}
