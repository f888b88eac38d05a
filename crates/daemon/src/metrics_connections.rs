//! Connections to the address of the metrics, on a thread of its own that ends with the mount.
//!
//! Whoever connects may be anybody: no connection lives longer than [`CONNECTION_LIMIT`], whether it sends
//! nothing or reads nothing; at most [`CONNECTIONS_MAX`] are open, where the oldest makes room for the next,
//! so idle ones keep nobody out. What a client does wrong is its own affair: the log is not for strangers to fill.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::metrics_address::Listener;
use super::page::Access;

/// Connections at a time. A scrape takes milliseconds, and few programs scrape one mount.
const CONNECTIONS_MAX: usize = 32;
/// The life of a connection: Prometheus gives up after ten seconds itself.
const CONNECTION_LIMIT: Duration = Duration::from_secs(10);
/// How long a request line and its headers may take.
const HEADERS_LIMIT: Duration = Duration::from_secs(5);
/// What they may be long; the least that hyper takes.
const HEADERS_BYTES_MAX: usize = 8192;
/// A pause where no connection can be taken, for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Who answers.
pub(super) trait Answers: Send + Sync + 'static {
    /// One request, from somebody who may be shown so much without saying more.
    fn answer(
        self: &Arc<Self>, request: Request<Incoming>, access: Access,
    ) -> impl Future<Output = Response<String>> + Send;

    /// What is done meanwhile.
    fn meanwhile(self: &Arc<Self>) -> impl Future<Output = ()> + Send;
}

/// A socket, without the file that goes with it.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(std::net::TcpListener),
    Unix(std::os::unix::net::UnixListener),
}

impl Socket {
    /// Takes a listener apart.
    pub(super) fn of(listener: Listener) -> (Socket, Option<super::metrics_address::SocketFile>) {
        match listener {
            Listener::Tcp(listener) => (Socket::Tcp(listener), None),
            Listener::Unix(listener, file) => (Socket::Unix(listener), Some(file)),
        }
    }

    /// Answers what connects until `stopped`, and drops all connections.
    pub(super) fn serve<A: Answers>(
        self, answers: &Arc<A>, stopped: oneshot::Receiver<()>,
    ) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(1)
            .thread_name("kvfs-page")
            .build()?;
        runtime.block_on(async {
            let beside = Arc::clone(answers);
            tokio::spawn(async move { beside.meanwhile().await });
            match self {
                Socket::Tcp(listener) => {
                    let listener = tokio::net::TcpListener::from_std(listener)?;
                    let next = async || Ok((listener.accept().await?.0, Access::Sums));
                    select(pin!(accept(next, answers)), stopped).await;
                }
                Socket::Unix(listener) => {
                    let listener = tokio::net::UnixListener::from_std(listener)?;
                    let next = async || {
                        let stream = listener.accept().await?.0;
                        let access = access_of(&stream);
                        Ok((stream, access))
                    };
                    select(pin!(accept(next, answers)), stopped).await;
                }
            }
            Ok(())
        })
    }
}

/// The socket is its owner's, who may have opened it to others since.
fn access_of(stream: &tokio::net::UnixStream) -> Access {
    let own = nix::unistd::geteuid().as_raw();
    match stream.peer_cred() {
        Ok(peer) if peer.uid() == 0 || peer.uid() == own => Access::All,
        _ => Access::Sums,
    }
}

async fn accept<S: AsyncRead + AsyncWrite + Unpin + Send + 'static, A: Answers>(
    next: impl AsyncFn() -> io::Result<(S, Access)>, answers: &Arc<A>,
) -> Infallible {
    let mut connections = VecDeque::<AbortHandle>::new();
    loop {
        let Ok((stream, access)) = next().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        connections.retain(|connection| !connection.is_finished());
        if connections.len() == CONNECTIONS_MAX
            && let Some(oldest) = connections.pop_front()
        {
            oldest.abort();
        }
        let answered = answer(stream, access, Arc::clone(answers));
        let answered = tokio::time::timeout(CONNECTION_LIMIT, answered);
        connections.push_back(tokio::spawn(answered).abort_handle());
    }
}

/// One request.
async fn answer<S: AsyncRead + AsyncWrite + Unpin, A: Answers>(
    stream: S, access: Access, answers: Arc<A>,
) {
    let service = service_fn(|request: Request<Incoming>| {
        let answers = Arc::clone(&answers);
        async move { Ok::<_, Infallible>(answers.answer(request, access).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS_LIMIT)
        .max_buf_size(HEADERS_BYTES_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    let _ = connection.await;
}
