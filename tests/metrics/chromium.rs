//! A headless Chromium, as far as the test of the page needs one: it opens addresses, and says what it sees.
//!
//! It is asked by the protocol of its developer tools, over a WebSocket on the loopback.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::mount::scratch_directory;
use crate::common::{forks, within};

const START: Duration = Duration::from_secs(60);

/// A browser with one window.
pub(crate) struct Chromium {
    process: Child,
    socket: TcpStream,
    last: u64,
    _profile: tempfile::TempDir,
}

impl Drop for Chromium {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Chromium {
    pub(crate) fn start(further: &[&str]) -> Chromium {
        let profile = scratch_directory();
        let mut command = Command::new("chromium");
        command.args([
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
        ]);
        command.args([
            "--no-first-run",
            "--disable-background-networking",
            "--remote-debugging-port=0",
        ]);
        command.arg(format!("--user-data-dir={}", profile.path().display())).args(further);
        command.env("HOME", profile.path()).arg("about:blank");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = forks::spawn(&mut command).unwrap();
        let port = within(START, "chromium to start", || {
            let told = fs::read_to_string(profile.path().join("DevToolsActivePort")).ok()?;
            told.lines().next()?.parse::<u16>().ok()
        });
        let path = within(START, "a window of chromium", || window(port));
        let socket = upgraded(port, &path);
        Chromium { process, socket, last: 0, _profile: profile }
    }

    /// Asks for something and waits for the answer.
    pub(crate) fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.last += 1;
        let id = self.last;
        self.send(&json!({ "id": id, "method": method, "params": parameters }).to_string());
        loop {
            let told: Value = serde_json::from_str(&self.receive()).unwrap();
            if told["id"] == id {
                assert_eq!(told["error"], Value::Null, "{method}");
                return told["result"].clone();
            }
        }
    }

    pub(crate) fn open(&mut self, address: &str) {
        // What nobody looks at asks for nothing.
        self.call("Page.bringToFront", &json!({}));
        self.call("Emulation.setFocusEmulationEnabled", &json!({ "enabled": true }));
        // Another part of the same document would not be loaded again.
        self.call("Page.navigate", &json!({ "url": "about:blank" }));
        self.call("Page.navigate", &json!({ "url": address }));
    }

    /// What an expression is in the document.
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let parameters = json!({ "expression": expression, "returnByValue": true });
        self.call("Runtime.evaluate", &parameters)["result"]["value"].clone()
    }

    /// The text that somebody sees.
    pub(crate) fn text(&mut self) -> String {
        self.value("document.body.innerText").as_str().unwrap_or_default().to_owned()
    }

    /// Waits until the text has this in it.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, words: &str) -> String {
        let deadline = Instant::now() + START;
        loop {
            let text = self.text();
            if text.contains(words) {
                return text;
            }
            let is_hidden = self.value("document.hidden");
            assert!(
                Instant::now() < deadline,
                "waited in vain for {words:?} (hidden: {is_hidden}): {text}"
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// How wide the window is, and whether it is dark.
    pub(crate) fn shape(&mut self, width: u32, is_dark: bool) {
        let metrics =
            json!({ "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", &metrics);
        let scheme = if is_dark { "dark" } else { "light" };
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.call("Emulation.setEmulatedMedia", &json!({ "features": features }));
    }

    /// A picture of the whole document, where `KVFS_SCREENSHOTS` names a directory for people to look at it.
    pub(crate) fn picture(&mut self, name: &str) {
        let Some(directory) = std::env::var_os("KVFS_SCREENSHOTS") else { return };
        let height = self.value("document.documentElement.scrollHeight");
        let width = self.value("window.innerWidth");
        let clip = json!({ "x": 0, "y": 0, "width": width, "height": height, "scale": 1 });
        let parameters = json!({ "captureBeyondViewport": true, "clip": clip });
        let taken = self.call("Page.captureScreenshot", &parameters);
        let bytes = decoded(taken["data"].as_str().unwrap());
        fs::write(Path::new(&directory).join(format!("{name}.png")), bytes).unwrap();
    }

    /// One frame, masked with zeros.
    fn send(&mut self, text: &str) {
        let mut frame = vec![0x81];
        match text.len() {
            length @ 0..126 => frame.push(0x80 | u8::try_from(length).unwrap()),
            length => {
                frame.push(0x80 | 0x7e);
                frame.extend(u16::try_from(length).unwrap().to_be_bytes());
            }
        }
        frame.extend([0; 4]);
        frame.extend(text.as_bytes());
        self.socket.write_all(&frame).unwrap();
    }

    /// One message, of as many frames as it has.
    fn receive(&mut self) -> String {
        let mut message = Vec::new();
        loop {
            let [kind, short] = self.bytes::<2>();
            let length = match short & 0x7f {
                126 => u64::from(u16::from_be_bytes(self.bytes())),
                127 => u64::from_be_bytes(self.bytes()),
                short => short.into(),
            };
            let begin = message.len();
            message.resize(begin + usize::try_from(length).unwrap(), 0);
            self.socket.read_exact(&mut message[begin..]).unwrap();
            if kind & 0x80 != 0 {
                return String::from_utf8(message).unwrap();
            }
        }
    }

    fn bytes<const COUNT: usize>(&mut self) -> [u8; COUNT] {
        let mut bytes = [0; COUNT];
        self.socket.read_exact(&mut bytes).unwrap();
        bytes
    }
}

/// The path of the socket of a new window: those that are there may be parts of the browser itself.
fn window(port: u16) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    write!(stream, "PUT /json/new?about:blank HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").ok()?;
    stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let mut answer = Vec::new();
    // It does not close the connection.
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer);
    let path = answer.split("/devtools/page/").last()?.split('"').next()?;
    answer.contains("/devtools/page/").then(|| format!("/devtools/page/{path}"))
}

fn upgraded(port: u16, path: &str) -> TcpStream {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
    write!(
        socket,
        "GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    .unwrap();
    socket.set_read_timeout(Some(START)).unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        socket.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    assert!(head.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&head));
    socket
}

/// Base64.
fn decoded(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut bytes = Vec::new();
    let (mut bits, mut count) = (0_u32, 0);
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        let value = DIGITS.iter().position(|digit| *digit == letter).unwrap();
        bits = bits << 6 | u32::try_from(value).unwrap();
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from(bits >> count & 0xff).unwrap());
        }
    }
    bytes
}
