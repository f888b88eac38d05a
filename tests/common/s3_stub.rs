//! An object store in memory, on loopback, that answers as the test says: slowly, or for ever.
//!
//! What it does honestly is what kvfs asks of S3, with objects that go in one request.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use super::s3_server::{SECRET, environment};

const PAGE_KEYS: usize = 1000;
const XML: &str = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>";

/// What is asked.
pub(crate) struct Request {
    pub(crate) method: String,
    /// The object's key, empty for a listing.
    pub(crate) key: String,
    query: HashMap<String, String>,
    headers: HashMap<String, String>,
    body: Vec<u8>,
}

impl Request {
    /// Whether it lists what is below this.
    pub(crate) fn lists(&self, below: &str) -> bool {
        let prefix = self.query.get("prefix").map_or("", String::as_str);
        self.key.is_empty() && prefix.trim_end_matches('/').ends_with(below)
    }

    /// Whether it reads an object below this.
    pub(crate) fn gets(&self, below: &str) -> bool {
        self.method == "GET" && self.key.contains(below)
    }

    /// Whether it writes one there.
    pub(crate) fn puts(&self, below: &str) -> bool {
        self.method == "PUT" && self.key.contains(below)
    }
}

/// How it is answered.
pub(crate) enum Answer {
    Honest,
    /// After so long.
    After(Duration),
    /// The connection is reset before the request is read.
    Reset,
    /// A byte of the body each time.
    Drip(Duration),
    /// So many bytes per second.
    Slowly(usize),
    /// A page of a listing without a name, and another one behind it.
    Empty,
    /// A page with names that nobody has heard of, and another one behind it.
    Endless,
}

impl Answer {
    /// This one where something is so, and an honest one else.
    pub(crate) fn when(self, is_so: bool) -> Answer {
        if is_so { self } else { Answer::Honest }
    }
}

type Rule = Arc<dyn Fn(&Request) -> Answer + Send + Sync>;
type Objects = BTreeMap<String, (SystemTime, Vec<u8>)>;

struct Shared {
    objects: Mutex<Objects>,
    rule: Mutex<Rule>,
    pages: AtomicU64,
}

/// A running store. Its threads end with the test.
pub(crate) struct Stub {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Stub {
    pub(crate) fn start() -> Stub {
        Stub::holding(BTreeMap::new())
    }

    fn holding(objects: Objects) -> Stub {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let rule: Rule = Arc::new(|_: &Request| Answer::Honest);
        let shared = Shared {
            objects: Mutex::new(objects),
            rule: Mutex::new(rule),
            pages: AtomicU64::new(0),
        };
        let shared = Arc::new(shared);
        let inner = Arc::clone(&shared);
        start("stub", move || {
            for client in listener.incoming().flatten() {
                let shared = Arc::clone(&inner);
                // A client that goes ends its connection, and with it this thread.
                start("connection", move || drop(serve(&client, &shared)));
            }
        });
        Stub { address, shared }
    }

    /// Another one that has the same.
    pub(crate) fn copy(&self) -> Stub {
        Stub::holding(self.shared.objects.lock().unwrap().clone())
    }

    /// How it answers from now on.
    pub(crate) fn answer(&self, rule: impl Fn(&Request) -> Answer + Send + Sync + 'static) {
        *self.shared.rule.lock().unwrap() = Arc::new(rule);
    }

    pub(crate) fn is_honest_again(&self) {
        self.answer(|_| Answer::Honest);
    }

    pub(crate) fn keys(&self, below: &str) -> Vec<String> {
        let objects = self.shared.objects.lock().unwrap();
        objects.keys().filter(|key| key.contains(below)).cloned().collect()
    }

    pub(crate) fn environment(&self) -> Vec<(String, String)> {
        environment(self.address, SECRET)
    }
}

/// Runs something beside the test, until the process ends.
fn start(name: &str, run: impl FnOnce() + Send + 'static) {
    std::thread::Builder::new().name(name.to_owned()).spawn(run).unwrap();
}

/// What goes back.
struct Reply {
    status: &'static str,
    headers: String,
    body: Vec<u8>,
}

fn reply(status: &'static str, body: impl Into<Vec<u8>>) -> Reply {
    Reply { status, headers: String::new(), body: body.into() }
}

fn refusal(status: &'static str, code: &str) -> Reply {
    reply(status, format!("{XML}<Error><Code>{code}</Code><Message>{code}</Message></Error>"))
}

fn serve(client: &TcpStream, shared: &Shared) -> std::io::Result<()> {
    let mut reader = BufReader::new(client);
    while let Some(mut request) = read_head(&mut reader)? {
        let rule = Arc::clone(&shared.rule.lock().unwrap());
        let answer = rule(&request);
        if matches!(answer, Answer::Reset) {
            // What has come and is not read makes a reset of the end.
            return Ok(());
        }
        reader.read_exact(&mut request.body)?;
        if let Answer::After(pause) = answer {
            std::thread::sleep(pause);
        }
        let reply = match &answer {
            Answer::Empty => page("", Some("more")),
            Answer::Endless => endless(&request, shared),
            _ => shared.answer(&request),
        };
        let length = reply.body.len();
        let head = format!(
            "HTTP/1.1 {}\r\nContent-Length: {length}\r\n{}\r\n",
            reply.status, reply.headers
        );
        let mut client = client;
        client.write_all(head.as_bytes())?;
        match answer {
            _ if request.method == "HEAD" => {}
            Answer::Drip(pause) => {
                for byte in reply.body {
                    client.write_all(&[byte])?;
                    std::thread::sleep(pause);
                }
            }
            Answer::Slowly(rate) => {
                for part in reply.body.chunks(rate / 20) {
                    client.write_all(part)?;
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
            _ => client.write_all(&reply.body)?,
        }
    }
    Ok(())
}

/// The request, with space for its body.
fn read_head(reader: &mut impl BufRead) -> std::io::Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split(' ');
    let method = words.next().unwrap_or_default().to_owned();
    let target = words.next().unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let pairs = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let query = pairs.map(|(name, value)| (name.to_owned(), plain(value))).collect();
    let path = plain(path);
    let (_bucket, key) = path.trim_start_matches('/').split_once('/').unwrap_or((&path, ""));
    let key = key.to_owned();
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").and_then(|text| text.parse().ok());
    let body = vec![0; length.unwrap_or(0)];
    Ok(Some(Request { method, key, query, headers, body }))
}

/// Without `%XX`.
fn plain(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, behind @ ..] = rest {
        let code = match (first, behind) {
            (b'%', [high, low, ..]) => {
                let digits = [*high, *low];
                u8::from_str_radix(str::from_utf8(&digits).unwrap(), 16).ok()
            }
            _ => None,
        };
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &behind[2..] } else { behind };
    }
    String::from_utf8(bytes).unwrap()
}

impl Shared {
    fn answer(&self, request: &Request) -> Reply {
        let mut objects = self.objects.lock().unwrap();
        match request.method.as_str() {
            "GET" if request.key.is_empty() => list(&objects, request),
            "GET" | "HEAD" => match objects.get(&request.key) {
                Some((modified, bytes)) => object(request, *modified, bytes),
                None => refusal("404 Not Found", "NoSuchKey"),
            },
            "PUT" => {
                let is_new = request.headers.get("if-none-match").is_some_and(|what| what == "*");
                if is_new && objects.contains_key(&request.key) {
                    return refusal("412 Precondition Failed", "PreconditionFailed");
                }
                let object = (SystemTime::now(), request.body.clone());
                objects.insert(request.key.clone(), object);
                Reply { headers: "ETag: \"0\"\r\n".to_owned(), ..reply("200 OK", "") }
            }
            "DELETE" => {
                objects.remove(&request.key);
                reply("204 No Content", "")
            }
            _ => refusal("501 Not Implemented", "NotImplemented"),
        }
    }
}

fn object(request: &Request, modified: SystemTime, bytes: &[u8]) -> Reply {
    let headers = format!("ETag: \"0\"\r\nLast-Modified: {}\r\n", time(modified, true));
    let range = request.headers.get("range").and_then(|range| {
        let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?.min(bytes.len() - 1)))
    });
    let Some((first, last)) = range else {
        return Reply { headers, ..reply("200 OK", bytes) };
    };
    let headers = format!("{headers}Content-Range: bytes {first}-{last}/{}\r\n", bytes.len());
    Reply { headers, ..reply("206 Partial Content", &bytes[first..=last]) }
}

fn list(objects: &Objects, request: &Request) -> Reply {
    let word = |name| request.query.get(name).map_or("", String::as_str);
    let after = word("continuation-token").max(word("start-after"));
    let is_listed = |key: &str| key.starts_with(word("prefix")) && key > after;
    let found = objects.iter().filter(|(key, _)| is_listed(key));
    let mut found = found.peekable();
    let (mut contents, mut last) = (String::new(), "");
    for (key, (modified, bytes)) in found.by_ref().take(PAGE_KEYS) {
        contents += &entry(key, *modified, bytes.len());
        last = key;
    }
    page(&contents, found.peek().map(|_| last))
}

fn entry(key: &str, modified: SystemTime, bytes: usize) -> String {
    format!(
        "<Contents><Key>{key}</Key><LastModified>{}</LastModified><ETag>\"0\"</ETag><Size>{bytes}</Size></Contents>",
        time(modified, false)
    )
}

fn page(contents: &str, more: Option<&str>) -> Reply {
    let mut text = format!("{XML}<ListBucketResult><IsTruncated>{}</IsTruncated>", more.is_some());
    if let Some(token) = more {
        let _ = write!(text, "<NextContinuationToken>{token}</NextContinuationToken>");
    }
    reply("200 OK", text + contents + "</ListBucketResult>")
}

/// Manifests of stores that there cannot be.
fn endless(request: &Request, shared: &Shared) -> Reply {
    let page_number = shared.pages.fetch_add(1, Ordering::Relaxed);
    let prefix = request.query.get("prefix").map_or("", |prefix| prefix.trim_end_matches('/'));
    let mut contents = String::new();
    for number in 0..PAGE_KEYS as u64 {
        let id = page_number * PAGE_KEYS as u64 + number;
        let key = format!("{prefix}/{id:032x}/{:016x}", 1);
        contents += &entry(&key, SystemTime::now(), 100);
    }
    page(&contents, Some("more"))
}

/// As a header of HTTP has it, or as a listing has.
fn time(at: SystemTime, is_header: bool) -> String {
    let seconds = at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let clock = format!("{:02}:{:02}:{:02}", rest / 3600, rest / 60 % 60, rest % 60);
    let (year, month, day) = kvfs::page::calendar::date_of(days.cast_signed());
    if !is_header {
        return format!("{year:04}-{month:02}-{day:02}T{clock}.000Z");
    }
    let weekday = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"][(days % 7) as usize];
    let months =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let month = months[usize::try_from(month).unwrap() - 1];
    format!("{weekday}, {day:02} {month} {year:04} {clock} GMT")
}
