//! The page at the address of the metrics: who is shown what, and what a browser is kept from.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::common::mount::scratch_directory;
use crate::common::sys::write_and_close;
use crate::common::{Mode, Model, Mount, eventually, forks};
use crate::writer::Sequence;

in_both_modes!(
    a_page_shows_sums_to_all_and_names_to_its_owner,
    requests_through_a_strange_name_are_refused,
    nothing_is_changed_and_nothing_is_shared,
    a_socket_shows_everything_to_its_owner_alone,
    maps_and_names_have_bounds,
);

const PORT: [&str; 2] = ["--metrics-addr", "127.0.0.1:0"];
/// Of a sequence; in a browser it would run, and in a terminal write over what is there.
pub(crate) const HOSTILE: &str = "<img src=x onerror=document.title='harm'>\u{1b}[2J";
const OTHER_USER: u32 = 65_534;

/// A status, headers in lower case, and a body.
struct Answer {
    status: u16,
    headers: String,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        serde_json::from_str(&self.body).unwrap()
    }

    fn refused(&self, status: u16, why: &str) {
        assert_eq!(self.status, status, "{}", self.body);
        assert!(self.body.contains(why) && self.body.lines().count() <= 1, "{}", self.body);
    }
}

fn ask(mut stream: impl Read + Write, request: &str) -> Answer {
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect(&answer);
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, headers: head.to_ascii_lowercase(), body: body.to_owned() }
}

fn connect(mount: &Mount) -> TcpStream {
    let stream = TcpStream::connect(mount.status("metrics_address")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(15))).unwrap();
    stream
}

fn get(mount: &Mount, path: &str, further: &str) -> Answer {
    ask(connect(mount), &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{further}\r\n"))
}

/// The address for a browser, and the header that its token makes.
pub(crate) fn owners_address(mount: &Mount) -> (String, String) {
    let address = fs::read_to_string(mount.join(".kvfs/page")).unwrap();
    let address = address.trim_end().to_owned();
    let (_, token) = address.split_once('#').expect(&address);
    let header = format!("Authorization: Bearer {token}\r\n");
    (address, header)
}

/// A sequence with a hostile name, and a page in it that was refused, which is an event.
pub(crate) fn with_names(mount: &Mount) -> Model {
    let model = Model::small();
    model.install(mount);
    Sequence::new(&model, HOSTILE).append(mount, &model, &(0..70).collect::<Vec<_>>());
    write_and_close(model.page_path(mount, HOSTILE, 0, 96), b"no page").unwrap_err();
    model
}

/// A path as a part of an address.
pub(crate) fn coded(path: &str) -> String {
    path.bytes().map(|byte| format!("%{byte:02x}")).collect::<Vec<_>>().concat()
}

fn a_page_shows_sums_to_all_and_names_to_its_owner(mode: Mode) {
    let mut mount = Mount::with_options(mode, &PORT);
    let model = with_names(&mount);
    let sequences = model.directory(&mount).join("sequences");
    let sequences = sequences.strip_prefix(mount.path()).unwrap().to_str().unwrap();
    let map = format!("/map.json?path={}", coded(&format!("{sequences}/{HOSTILE}")));
    let all = |mount: &Mount, header: &str| {
        eventually("the event to be told", || {
            let told = get(mount, "/page.json", header).json();
            (!told["events"].as_array().unwrap().is_empty()).then_some(told)
        })
    };
    let (address, header) = owners_address(&mount);
    assert!(address.starts_with(&format!("http://{}/#", mount.status("metrics_address"))));
    let told = all(&mount, &header);
    assert_eq!(told["access"], "all");
    let events = told["events"].as_array().unwrap();
    let refused = events.iter().find(|event| event["what"] == "refused").unwrap();
    assert!(refused["place"].as_str().unwrap().contains("onerror"), "{told}");
    assert!(told["status"].as_str().unwrap().contains(mount.store().to_str().unwrap()));
    assert!(told["past"][0]["disk"][0].is_u64(), "{told}");
    let drawn = get(&mount, &map, &header).json();
    assert_eq!(drawn["rows"].as_array().unwrap().len(), 2, "{drawn}");
    assert_eq!(drawn["rows"][0]["label"], "000");
    assert!(get(&mount, "/names.json", &header).body.contains("onerror"));

    // Without the token the same figures, and no name but the mountpoint.
    for (path, status) in [("/", 200), ("/page.json", 200), ("/metrics", 200), (&*map, 403)] {
        let answer = get(&mount, path, "");
        assert_eq!(answer.status, status, "{path}");
        assert!(answer.body.contains(mount.path().to_str().unwrap()) || status == 403);
        for name in ["onerror", "sequences", mount.store().to_str().unwrap()] {
            assert!(
                !answer.body.replace("models/NAME/sequences/SEQUENCE", "").contains(name)
                    || path == "/" && name == "sequences",
                "{path} {name}"
            );
        }
    }
    let sums = get(&mount, "/page.json", "").json();
    assert_eq!(
        (&sums["access"], &sums["state"], &sums["status"]),
        (&"sums".into(), &"ok".into(), &Value::Null)
    );
    assert_eq!(sums["events"], Value::Array(Vec::new()));
    get(&mount, "/names.json", "").refused(403, ".kvfs/page");
    for wrong in
        ["Authorization: Bearer 0\r\n", "Authorization: Basic eDp5\r\n", "Authorization:\r\n"]
    {
        get(&mount, "/page.json", wrong).refused(401, "read MOUNTPOINT/.kvfs/page anew");
    }
    // Another mount has another token.
    let page = mount.join(".kvfs/page");
    assert_eq!(fs::metadata(&page).unwrap().permissions().mode() & 0o777, 0o400);
    mount.remount();
    get(&mount, "/page.json", &header).refused(401, "token");
    assert_ne!(owners_address(&mount).1, header);
}

fn requests_through_a_strange_name_are_refused(mode: Mode) {
    let options = [PORT.as_slice(), &["--metrics-host", "node1.example other"]].concat();
    let mount = Mount::with_options(mode, &options);
    let header = owners_address(&mount).1;
    for path in ["/", "/metrics", "/page.json", "/names.json", "/nothing"] {
        let ask = |host: &str| {
            ask(connect(&mount), &format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n{header}\r\n"))
        };
        for strange in ["evil.example", "evil.example:9400", "127.0.0.1.evil.example", "", "a b"] {
            ask(strange).refused(403, "is not one of this mount's");
        }
        for known in ["127.0.0.1", "[::1]:9400", "localhost:1", "node1.example:9400", "OTHER"] {
            assert_ne!(ask(known).status, 403, "{path} {known}");
        }
    }
    let absolute = "GET http://evil.example/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
    ask(connect(&mount), absolute).refused(403, "\"evil.example\"");
    ask(connect(&mount), "GET /metrics HTTP/1.1\r\n\r\n").refused(403, "no Host");
}

fn nothing_is_changed_and_nothing_is_shared(mode: Mode) {
    let mount = Mount::with_options(mode, &PORT);
    let (_, header) = owners_address(&mount);
    for path in ["/", "/metrics", "/page.json", "/names.json", "/map.json?path=models", "/x"] {
        let answer = get(&mount, path, &format!("Origin: http://evil.example\r\n{header}"));
        for line in [
            "x-content-type-options: nosniff",
            "x-frame-options: deny",
            "cache-control: no-store",
            "referrer-policy: no-referrer",
            "cross-origin-resource-policy: same-origin",
            "content-security-policy: default-src 'none'; ",
            "frame-ancestors 'none'",
        ] {
            assert!(answer.headers.contains(line), "{path} {line}: {}", answer.headers);
        }
        assert!(!answer.headers.contains("access-control"), "{}", answer.headers);
        assert!(!answer.headers.contains("unsafe"), "{}", answer.headers);
        assert!(!answer.headers.contains("set-cookie"), "{}", answer.headers);
        for method in ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"] {
            let request = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n");
            let answer = ask(connect(&mount), &request);
            assert_eq!(answer.status, 405, "{method} {path}");
            assert!(answer.headers.contains("allow: get, head"), "{}", answer.headers);
        }
    }
    // Scripts run with a word that is another one each time.
    let nonce = || {
        let answer = get(&mount, "/", "");
        let nonce = answer.headers.split("'nonce-").nth(1).unwrap().split('\'').next().unwrap();
        assert_eq!(answer.body.matches(&format!("nonce=\"{nonce}\"")).count(), 2);
        assert!(answer.body.contains("state: ok") || answer.body.contains("ok"), "{}", answer.body);
        nonce.to_owned()
    };
    assert_ne!(nonce(), nonce());
    let head = ask(connect(&mount), "HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert_eq!((head.status, &*head.body), (200, ""));
}

fn a_socket_shows_everything_to_its_owner_alone(mode: Mode) {
    require!(root, python3, setpriv);
    let beside = scratch_directory();
    let socket = beside.path().join("page.socket");
    let address = format!("unix:{}", socket.display());
    let mount = Mount::with_options(mode, &["--metrics-addr", &address]);
    with_names(&mount);
    assert_eq!(fs::read_to_string(mount.join(".kvfs/page")).unwrap(), format!("{address}\n"));
    let request = "GET /page.json HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let told = ask(UnixStream::connect(&socket).unwrap(), request).json();
    assert_eq!(told["access"], "all");
    // Somebody has opened the socket to all: what was the owner's stays that.
    for path in beside.path().ancestors().take(2).chain([socket.as_path()]) {
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
    }
    let script = format!(
        "python3 -c \"import socket; s = socket.socket(socket.AF_UNIX); s.connect('{}'); \
         s.sendall(b'GET /page.json HTTP/1.0\\r\\n\\r\\n'); print(s.makefile().read())\"",
        socket.display()
    );
    let output = forks::output(&mut forks::shell_as(Path::new("/"), OTHER_USER, &script));
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(told.contains("\"access\":\"sums\""), "{output:?}");
    assert!(!told.contains("onerror"), "{told}");
    let script = format!("cat {}", mount.join(".kvfs/page").display());
    let output = forks::output(&mut forks::shell_as(Path::new("/"), OTHER_USER, &script));
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
}

fn maps_and_names_have_bounds(mode: Mode) {
    let mount = Mount::with_options(mode, &PORT);
    let header = owners_address(&mount).1;
    with_names(&mount);
    for number in 0..600 {
        fs::create_dir(mount.join(format!("models/m{number:03}"))).unwrap();
    }
    let names = get(&mount, "/names.json", &header).json();
    assert_eq!((names["paths"].as_array().unwrap().len(), &names["is_all"]), (500, &false.into()));
    for (path, why) in [
        ("path=models", "neither a sequence nor a model"),
        ("path=models/m000", "neither a sequence nor a model"),
        ("path=models/m000/sequences/a", "neither a sequence nor a model"),
        ("path=files", "neither a sequence nor a model"),
        ("path=", "neither a sequence nor a model"),
        ("path=models/%0a%1b[2J", "\\n\\u{1b}[2J is neither"),
        ("path=models/../models/m000", "neither a sequence nor a model"),
    ] {
        get(&mount, &format!("/map.json?{path}"), &header).refused(422, why);
    }
    get(&mount, "/map.json", &header).refused(400, "write path=");
    get(&mount, "/map.json?path=%zz", &header).refused(400, "hexadecimal");
    let long = format!("/map.json?path={}", "a".repeat(9000));
    assert_eq!(get(&mount, &long, &header).status / 100, 4);
}

#[test]
fn names_that_are_none_are_refused() {
    require!(fuse);
    for (options, why) in [
        (&["--metrics-host", "a"][..], "metrics_host is set, but no metrics_addr"),
        (
            &["--metrics-addr", "127.0.0.1:0", "--metrics-host", "http://a:1"],
            "\"http://a:1\" is no name of a machine",
        ),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        command.arg("mount").args(options).args(["/nowhere/store", "/nowhere/mnt"]);
        let output = forks::output(&mut command);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(why), "{text}");
    }
}
