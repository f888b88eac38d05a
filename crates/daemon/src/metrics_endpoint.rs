//! `GET /metrics` over HTTP, on a thread of its own that ends with the mount.
//!
//! Whoever connects may be anybody: no connection lives longer than [`CONNECTION_LIMIT`], whether it sends
//! nothing or reads nothing; at most [`CONNECTIONS_MAX`] are open, where the oldest makes room for the next,
//! so idle ones keep nobody out; and however many ask, the mount is asked once in [`TEXT_AGE_MAX`].
//! Requests of the kernel share nothing with this thread but the locks that reading `.kvfs/metrics` takes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use futures_util::future::select;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::background::start;
use super::metrics_address::{Listener, SocketFile};
use super::mount::MountError;
use kvfs_fs::FileSystem;

/// Connections at a time. A scrape takes milliseconds, and few programs scrape one mount.
const CONNECTIONS_MAX: usize = 32;
/// The life of a connection: Prometheus gives up after ten seconds itself.
const CONNECTION_LIMIT: Duration = Duration::from_secs(10);
/// How long a request line and its headers may take.
const HEADERS_LIMIT: Duration = Duration::from_secs(5);
/// What they may be long; the least that hyper takes.
const HEADERS_BYTES_MAX: usize = 8192;
/// How old an answer may be. Scrapes are seconds apart.
const TEXT_AGE_MAX: Duration = Duration::from_millis(100);
/// A pause where no connection can be taken, for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The thread; dropping this ends it.
#[derive(Debug)]
pub(super) struct MetricsEndpoint {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _file: Option<SocketFile>,
}

impl MetricsEndpoint {
    /// Answers what connects.
    pub(super) fn start(
        listener: Listener, file_system: &Arc<FileSystem>,
    ) -> Result<MetricsEndpoint, MountError> {
        let text = Arc::new(Text { file_system: Arc::clone(file_system), last: Mutex::default() });
        if let Ok(address) = listener.address() {
            log::info!("metrics are served at {address}");
            file_system.observer().serves_metrics_at(address.to_string());
        }
        let (socket, file) = match listener {
            Listener::Tcp(listener) => (Ok(listener), None),
            Listener::Unix(listener, file) => (Err(listener), Some(file)),
        };
        let (stop, stopped) = oneshot::channel();
        let thread = start("kvfs-metrics", move || {
            let outcome = match socket {
                Ok(listener) => run(stopped, || {
                    let listener = tokio::net::TcpListener::from_std(listener)?;
                    Ok(async move { accept(async || Ok(listener.accept().await?.0), &text).await })
                }),
                Err(listener) => run(stopped, || {
                    let listener = tokio::net::UnixListener::from_std(listener)?;
                    Ok(async move { accept(async || Ok(listener.accept().await?.0), &text).await })
                }),
            };
            if let Err(error) = outcome {
                log::error!("metrics are not served: {error}");
            }
        })?;
        Ok(MetricsEndpoint { stop: Some(stop), thread: Some(thread), _file: file })
    }
}

impl Drop for MetricsEndpoint {
    fn drop(&mut self) {
        drop(self.stop.take());
        super::background::join(self.thread.take().into_iter().collect());
    }
}

/// Runs what `accepting` makes until `stopped`, and drops all connections.
fn run<F: Future<Output = Infallible>>(
    stopped: oneshot::Receiver<()>, accepting: impl FnOnce() -> io::Result<F>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        select(pin!(accepting()?), stopped).await;
        Ok(())
    })
}

async fn accept<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    next: impl AsyncFn() -> io::Result<S>, text: &Arc<Text>,
) -> Infallible {
    let mut connections = VecDeque::<AbortHandle>::new();
    loop {
        let Ok(stream) = next().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        connections.retain(|connection| !connection.is_finished());
        if connections.len() == CONNECTIONS_MAX
            && let Some(oldest) = connections.pop_front()
        {
            oldest.abort();
        }
        let answered = tokio::time::timeout(CONNECTION_LIMIT, answer(stream, Arc::clone(text)));
        connections.push_back(tokio::spawn(answered).abort_handle());
    }
}

/// One request. What a client does wrong is its own affair: the log is not for strangers to fill.
async fn answer<S: AsyncRead + AsyncWrite + Unpin>(stream: S, text: Arc<Text>) {
    let service = service_fn(|request: Request<Incoming>| {
        let response = respond(&request, &text);
        async move { Ok::<_, Infallible>(response) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS_LIMIT)
        .max_buf_size(HEADERS_BYTES_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    let _ = connection.await;
}

fn respond<B>(request: &Request<B>, text: &Text) -> Response<String> {
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    let (status, body) = match (request.uri().path(), is_read) {
        ("/metrics", true) => (StatusCode::OK, text.get()),
        ("/metrics", false) => (StatusCode::METHOD_NOT_ALLOWED, String::new()),
        _ => (StatusCode::NOT_FOUND, "only /metrics is here\n".to_owned()),
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    let version = "text/plain; version=0.0.4; charset=utf-8";
    headers.insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(version));
    if status == StatusCode::METHOD_NOT_ALLOWED {
        headers.insert(ALLOW, hyper::header::HeaderValue::from_static("GET, HEAD"));
    }
    response
}

/// The metrics, as they were told last.
struct Text {
    file_system: Arc<FileSystem>,
    last: Mutex<Option<(Instant, String)>>,
}

impl Text {
    fn get(&self) -> String {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((told, text)) = &*last
            && told.elapsed() < TEXT_AGE_MAX
        {
            return text.clone();
        }
        let text = self.file_system.metrics();
        *last = Some((Instant::now(), text.clone()));
        text
    }
}
