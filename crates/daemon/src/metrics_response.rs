//! Answers over HTTP, with the headers that keep a browser from doing more with them than to show them.

use hyper::header::{
    ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue,
    REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use hyper::{Response, StatusCode};

/// What is answered.
#[derive(Clone, Copy, Debug)]
pub(super) enum Content<'a> {
    /// For Prometheus.
    Metrics,
    Json,
    /// A line for people.
    Line,
    /// A document whose own scripts and styles have this nonce.
    Document {
        nonce: &'a str,
    },
}

impl Content<'_> {
    fn kind(self) -> &'static str {
        match self {
            Content::Metrics => "text/plain; version=0.0.4; charset=utf-8",
            Content::Json => "application/json",
            Content::Line => "text/plain; charset=utf-8",
            Content::Document { .. } => "text/html; charset=utf-8",
        }
    }

    /// Nothing is loaded from elsewhere, and nothing runs but what the document itself brings.
    fn policy(self) -> String {
        let own = match self {
            Content::Document { nonce } => format!(
                "script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
                 img-src data:; require-trusted-types-for 'script'; "
            ),
            _ => String::new(),
        };
        format!(
            "default-src 'none'; {own}base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
    }
}

/// An answer.
pub(super) fn response(content: Content<'_>, body: String) -> Response<String> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_TYPE, content.kind()),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    // A nonce consists of hexadecimal digits.
    if let Ok(policy) = HeaderValue::from_str(&content.policy()) {
        headers.insert(CONTENT_SECURITY_POLICY, policy);
    }
    response
}

/// A refusal, and the line that says why.
pub(super) fn refused(status: StatusCode, why: String) -> Response<String> {
    let mut response = response(Content::Line, why);
    *response.status_mut() = status;
    if status == StatusCode::METHOD_NOT_ALLOWED {
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    }
    response
}
