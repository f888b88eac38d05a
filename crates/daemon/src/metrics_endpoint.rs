//! What is answered at the address of the metrics: `GET /metrics` for programs, a page for a browser.
//!
//! Nothing there changes anything. However many ask, the mount is asked once in [`TEXT_AGE_MAX`] for metrics and in
//! [`FIGURES_AGE_MAX`] for the page. Requests of the kernel share nothing with this thread but the locks that
//! reading `.kvfs/metrics` takes; what walks through directories runs on another one, one at a time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hyper::body::Incoming;
use hyper::header::AUTHORIZATION;
use hyper::{Method, Request, Response, StatusCode};
use tokio::sync::oneshot;

use super::background::start;
use super::hosts::Hosts;
use super::metrics_address::{Listener, MetricsAddress, SocketFile};
use super::metrics_connections::{Answers, Socket};
use super::metrics_response::{Content, refused, response};
use super::mount::{MountError, MountOptions};
use super::page::{Access, Look, Page};
use super::token::Token;
use kvfs_fs::glance::{self, Looker};
use kvfs_fs::{FileSystem, exposition};

/// How old an answer may be. Scrapes are seconds apart.
const TEXT_AGE_MAX: Duration = Duration::from_millis(100);
/// The same of what the page shows, which takes more work.
const FIGURES_AGE_MAX: Duration = Duration::from_secs(1);
/// How often the page takes in how the mount does while nobody looks.
const TICK: Duration = Duration::from_secs(10);
/// How long a map may take; a connection lives no longer than ten seconds.
const LOOK_LIMIT: Duration = Duration::from_secs(8);
const NOT_SHOWN: &str = "names, events and maps are shown to who mounted: \
    open the address that stands in MOUNTPOINT/.kvfs/page\n";

/// The thread; dropping this ends it.
#[derive(Debug)]
pub(super) struct MetricsEndpoint {
    stop: Option<oneshot::Sender<()>>,
    service: Arc<Service>,
    thread: Option<JoinHandle<()>>,
    _file: Option<SocketFile>,
}

impl MetricsEndpoint {
    /// Answers what connects.
    pub(super) fn start(
        listener: Listener, file_system: &Arc<FileSystem>, options: &MountOptions,
    ) -> Result<MetricsEndpoint, MountError> {
        let token = Token::new().map_err(|error| {
            MountError::Metrics(format!("metrics cannot be served: no random bytes: {error}"))
        })?;
        let service = Arc::new(Service {
            file_system: Arc::clone(file_system),
            page: options.page.clone(),
            hosts: Hosts(options.metrics_hosts.clone()),
            token,
            metrics: Mutex::default(),
            noted: Mutex::default(),
            is_ending: AtomicBool::new(false),
            is_looking: AtomicBool::new(false),
        });
        if let Ok(address) = listener.address() {
            log::info!("metrics are served at {address}");
            service.tell_address(&address);
        }
        let (socket, file) = Socket::of(listener);
        let (stop, stopped) = oneshot::channel();
        let answers = Arc::clone(&service);
        let thread = start("kvfs-metrics", move || {
            if let Err(error) = socket.serve(&answers, stopped) {
                log::error!("metrics are not served: {error}");
            }
        })?;
        Ok(MetricsEndpoint { stop: Some(stop), service, thread: Some(thread), _file: file })
    }
}

impl Drop for MetricsEndpoint {
    fn drop(&mut self) {
        self.service.is_ending.store(true, Ordering::Relaxed);
        drop(self.stop.take());
        super::background::join(self.thread.take().into_iter().collect());
    }
}

#[derive(Debug)]
struct Service {
    file_system: Arc<FileSystem>,
    page: Option<Arc<dyn Page>>,
    hosts: Hosts,
    token: Token,
    /// The metrics, as they were told last.
    metrics: Mutex<Option<(Instant, String)>>,
    /// When the page took in how the mount does.
    noted: Mutex<Option<Instant>>,
    is_ending: AtomicBool,
    is_looking: AtomicBool,
}

impl Answers for Service {
    async fn answer(
        self: &Arc<Self>, request: Request<Incoming>, access: Access,
    ) -> Response<String> {
        if let Err(why) = self.hosts.check(&request) {
            return refused(StatusCode::FORBIDDEN, why);
        }
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return refused(StatusCode::METHOD_NOT_ALLOWED, String::new());
        }
        let Ok(access) = self.access(&request, access) else {
            let why = "the token is not that of this mount: read MOUNTPOINT/.kvfs/page anew\n";
            return refused(StatusCode::UNAUTHORIZED, why.to_owned());
        };
        match (request.uri().path(), &self.page) {
            ("/metrics", _) => response(Content::Metrics, self.metrics()),
            ("/", Some(page)) => self.document(page.as_ref(), access),
            ("/page.json", Some(page)) => {
                self.note(page.as_ref(), FIGURES_AGE_MAX);
                response(Content::Json, page.figures(access))
            }
            ("/map.json" | "/names.json", Some(page)) => {
                if access != Access::All {
                    return refused(StatusCode::FORBIDDEN, NOT_SHOWN.to_owned());
                }
                let path = match request.uri().path() {
                    "/map.json" => Some(asked_path(request.uri().query().unwrap_or_default())),
                    _ => None,
                };
                self.look(page, path).await
            }
            _ => refused(StatusCode::NOT_FOUND, "/ and /metrics are here\n".to_owned()),
        }
    }

    /// What happened while nobody looked can be seen later.
    async fn meanwhile(self: &Arc<Self>) {
        let Some(page) = &self.page else { return };
        loop {
            self.note(page.as_ref(), TICK / 2);
            tokio::time::sleep(TICK).await;
        }
    }
}

impl Service {
    /// Tells how a browser is shown everything, in a file of the mount's owner.
    fn tell_address(&self, address: &MetricsAddress) {
        let observer = self.file_system.observer();
        observer.serves_metrics_at(address.to_string());
        if self.page.is_none() {
            return;
        }
        observer.shows_a_page_at(match address {
            MetricsAddress::Tcp(address) => {
                let mut reached = *address;
                // What listens everywhere is reached here, too.
                match address.ip() {
                    std::net::IpAddr::V4(ip) if ip.is_unspecified() => {
                        reached.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
                    }
                    std::net::IpAddr::V6(ip) if ip.is_unspecified() => {
                        reached.set_ip(std::net::Ipv6Addr::LOCALHOST.into());
                    }
                    _ => {}
                }
                format!("http://{reached}/#{}\n", self.token.text())
            }
            MetricsAddress::Unix(_) => format!("{address}\n"),
        });
    }

    /// What somebody may be shown who may have brought a token.
    fn access(&self, request: &Request<Incoming>, without: Access) -> Result<Access, ()> {
        let Some(given) = request.headers().get(AUTHORIZATION) else { return Ok(without) };
        let given = given.as_bytes().strip_prefix(b"Bearer ").unwrap_or_default();
        if self.token.is(given) { Ok(Access::All) } else { Err(()) }
    }

    fn metrics(&self) -> String {
        let mut last = self.metrics.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((told, text)) = &*last
            && told.elapsed() < TEXT_AGE_MAX
        {
            return text.clone();
        }
        let text = exposition(&self.file_system);
        *last = Some((Instant::now(), text.clone()));
        text
    }

    /// The page takes in how the mount does, unless it did lately.
    fn note(&self, page: &dyn Page, age_max: Duration) {
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        if noted.is_none_or(|noted| noted.elapsed() >= age_max) {
            page.note(glance::told(&self.file_system, page.last_event()));
            *noted = Some(Instant::now());
        }
    }

    fn document(&self, page: &dyn Page, access: Access) -> Response<String> {
        self.note(page, FIGURES_AGE_MAX);
        match Token::new() {
            Ok(nonce) => {
                let text = page.document(access, nonce.text());
                response(Content::Document { nonce: nonce.text() }, text)
            }
            Err(error) => {
                refused(StatusCode::INTERNAL_SERVER_ERROR, format!("no random bytes: {error}\n"))
            }
        }
    }

    /// A map, or without a path the names of what there is one of.
    async fn look(
        self: &Arc<Self>, page: &Arc<dyn Page>, path: Option<Result<String, String>>,
    ) -> Response<String> {
        let path = match path.transpose() {
            Ok(path) => path,
            Err(why) => return refused(StatusCode::BAD_REQUEST, why),
        };
        if self.is_looking.swap(true, Ordering::Acquire) {
            let why = "another map is being made: ask again in a moment\n";
            return refused(StatusCode::SERVICE_UNAVAILABLE, why.to_owned());
        }
        let (service, page) = (Arc::clone(self), Arc::clone(page));
        // It goes on where the connection does not, until its time is over.
        let looked = tokio::task::spawn_blocking(move || {
            let _turn = Turn(&service.is_looking);
            let look = Look {
                looker: Looker::of_daemon(&service.file_system),
                ends: Instant::now() + LOOK_LIMIT,
                is_ending: &service.is_ending,
            };
            match path {
                Some(path) => page.map(&look, &path),
                None => page.names(&look),
            }
        });
        match looked.await {
            Ok(Ok(json)) => response(Content::Json, json),
            Ok(Err(why)) => refused(StatusCode::UNPROCESSABLE_ENTITY, why + "\n"),
            Err(error) => refused(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
        }
    }
}

/// Ends a look, also where it panics.
struct Turn<'a>(&'a AtomicBool);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// The path in `path=...`.
fn asked_path(query: &str) -> Result<String, String> {
    let coded = query.split('&').find_map(|part| part.strip_prefix("path="));
    let coded = coded.ok_or("write path=models/NAME or path=models/NAME/sequences/SEQUENCE\n")?;
    let mut bytes = Vec::new();
    let mut rest = coded.as_bytes();
    while let [first, behind @ ..] = rest {
        if *first != b'%' {
            bytes.push(*first);
            rest = behind;
            continue;
        }
        let digits = behind.get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(byte.ok_or("behind % there are two hexadecimal digits\n")?);
        rest = &behind[2..];
    }
    String::from_utf8(bytes).map_err(|_| "the path is not UTF-8\n".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_are_asked_for() {
        let asked = |query: &str| asked_path(query).ok();
        assert_eq!(asked("path=models/a%20b%3c").as_deref(), Some("models/a b<"));
        assert_eq!(asked("a=b&path=%c3%a4").as_deref(), Some("\u{e4}"));
        assert_eq!(asked("path=").as_deref(), Some(""));
        for wrong in ["", "x", "path=%", "path=%1", "path=%zz", "path=%ff", "path=%+1"] {
            assert_eq!(asked(wrong), None, "{wrong}");
        }
    }
}
