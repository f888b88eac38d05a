//! Which names of this address are believed.
//!
//! A page of somebody else's can be read by a browser as if it came from here, if its name leads to this address a moment
//! later. Its name then stands in `Host`, where nobody puts a number or `localhost` for him.

use std::net::{IpAddr, Ipv6Addr};

use hyper::header::{HOST, HeaderValue};
use hyper::{Request, Version};

/// Names beside `localhost`.
#[derive(Debug)]
pub(super) struct Hosts(pub(super) Vec<String>);

impl Hosts {
    /// Whether a request names this address; the error says what to do.
    pub(super) fn check<B>(&self, request: &Request<B>) -> Result<(), String> {
        let mut named: Vec<&[u8]> =
            request.headers().get_all(HOST).iter().map(HeaderValue::as_bytes).collect();
        // Browsers always say it; programs of before HTTP 1.1 may not.
        if named.is_empty() && request.version() >= Version::HTTP_11 {
            return Err("the request has no Host\n".to_owned());
        }
        named.extend(request.uri().authority().map(|authority| authority.as_str().as_bytes()));
        let is_strange = |name: &&[u8]| !std::str::from_utf8(name).is_ok_and(|n| self.allows(n));
        match named.into_iter().find(is_strange) {
            None => Ok(()),
            Some(name) => Err(format!(
                "the Host {:?} is not one of this mount's: ask by address or as localhost, or \
                 name it in metrics_host (kvfs mount --metrics-host NAME)\n",
                String::from_utf8_lossy(name)
            )),
        }
    }

    fn allows(&self, authority: &str) -> bool {
        let (name, rest) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((name, rest)) if name.parse::<Ipv6Addr>().is_ok() => (name, rest),
            Some(_) => return false,
            None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
        };
        let is_port = rest.is_empty()
            || rest.strip_prefix(':').is_some_and(|port| port.bytes().all(|b| b.is_ascii_digit()));
        let is_name = |known: &str| name.eq_ignore_ascii_case(known);
        let is_known = name.parse::<IpAddr>().is_ok()
            || is_name("localhost")
            || self.0.iter().any(|known| is_name(known));
        is_port && is_known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_an_address() {
        let hosts = Hosts(vec!["node1.example".to_owned()]);
        for allowed in [
            "127.0.0.1",
            "127.0.0.1:9400",
            "10.1.2.3:80",
            "[::1]",
            "[::1]:9400",
            "localhost",
            "LocalHost:1",
            "node1.example",
            "Node1.Example:9400",
            "localhost:",
        ] {
            assert!(hosts.allows(allowed), "{allowed}");
        }
        for refused in [
            "",
            ":9400",
            "evil.example",
            "evil.example:9400",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.node1.example",
            "localhost:9400:1",
            "localhost@evil",
            "evil@localhost",
            "[::1",
            "[evil]",
            "[::1]x",
            "[::1]:x",
            "::1",
            "localhost:x",
            "127.0.0.1 ",
            "localhost/",
        ] {
            assert!(!hosts.allows(refused), "{refused}");
        }
    }

    #[test]
    fn every_place_that_names_one_counts() {
        let hosts = Hosts(Vec::new());
        let check = |uri: &str, names: &[&[u8]], version: Version| {
            let mut request = Request::builder().uri(uri).version(version);
            for name in names {
                request = request.header(HOST, *name);
            }
            hosts.check(&request.body(()).unwrap()).is_ok()
        };
        assert!(check("/", &[b"localhost"], Version::HTTP_11));
        assert!(check("/", &[], Version::HTTP_10));
        assert!(!check("/", &[], Version::HTTP_11));
        assert!(!check("/", &[b"evil.example"], Version::HTTP_10));
        assert!(!check("/", &[b"localhost", b"evil.example"], Version::HTTP_11));
        assert!(!check("/", &[b"local\xffhost"], Version::HTTP_11));
        assert!(!check("http://evil.example/", &[b"localhost"], Version::HTTP_11));
        assert!(check("http://localhost:1/", &[b"localhost:1"], Version::HTTP_11));
    }
}
