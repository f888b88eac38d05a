//! Which decision an error of the object store leads to.

use std::error::Error as _;

use object_store::Error;
use object_store::client::{HttpError, HttpErrorKind};

use super::patience::TooSlow;
use crate::error::RemoteError;

/// Longest text of a cause: servers answer with pages of XML.
const CAUSE_CHARS_MAX: usize = 300;

/// `what` says the operation, the name and the place.
pub(super) fn classify(what: &str, error: &Error) -> RemoteError {
    let cause = one_line(&error.to_string());
    let text = format!("{what}: {cause}{}", first_cause(error, &cause));
    if let Some(TooSlow(why)) = causes(error).find_map(|cause| cause.downcast_ref()) {
        return RemoteError::Slow(format!("{what} {why}"));
    }
    if cause.contains("NoSuchBucket") {
        return RemoteError::Other(format!("{what}: there is no such bucket, create it"));
    }
    match error {
        Error::NotFound { .. } => RemoteError::Missing(text),
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => RemoteError::Denied(text),
        _ => match status(&cause) {
            // Of MinIO and Ceph, for a full disk or quota.
            Some(507) => RemoteError::Full(text),
            Some(400) if cause.contains("ExpiredToken") || cause.contains("InvalidToken") => {
                RemoteError::Denied(text)
            }
            Some(408 | 429 | 500 | 502..=599) => RemoteError::Unreachable(text),
            None if has_no_answer(error) => RemoteError::Unreachable(text),
            _ => RemoteError::Other(text),
        },
    }
}

/// The library keeps the status of an answer in its text only.
fn status(cause: &str) -> Option<u16> {
    let (_, rest) = cause.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

/// Whether the failure is one of the connection.
fn has_no_answer(error: &Error) -> bool {
    causes(error).any(<dyn std::error::Error>::is::<HttpError>)
}

/// Whether the connection broke under a request, which may have been carried out all the same: a server that closes
/// one that nobody used for a while does so at any moment.
pub(super) fn has_lost_connection(error: &Error) -> bool {
    let mut causes = causes(error).filter_map(|cause| cause.downcast_ref::<HttpError>());
    causes.any(|cause| cause.kind() == HttpErrorKind::Interrupted)
}

fn causes(error: &Error) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(error.source(), |&cause| cause.source())
}

/// What the library's words do not say: they end with the request that failed, and not with why.
fn first_cause(error: &Error, said: &str) -> String {
    let first = causes(error).last().map(|first| one_line(&first.to_string()));
    match first.filter(|first| !said.contains(first.as_str())) {
        Some(first) if first.contains("peer certificate") => {
            format!(": {first}; SSL_CERT_FILE names a file with the certificate of who signed it")
        }
        Some(first) => format!(": {first}"),
        None => String::new(),
    }
}

fn one_line(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").chars().take(CAUSE_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_an_answer_decides() {
        fn check(answer: &str, expected: &str) {
            let source = format!("Server returned non-2xx status code: {answer}: <xml>\n</xml>");
            let error = Error::Generic { store: "S3", source: source.into() };
            let error = classify("remote s3://b: put x", &error);
            assert_eq!(error.label(), expected, "{answer}");
            assert!(!error.to_string().contains('\n'), "{error}");
        }
        check("503 Service Unavailable", "unreachable");
        check("429 Too Many Requests", "unreachable");
        check("507 Insufficient Storage", "full");
        check("400 Bad Request: ExpiredToken", "denied");
        check("400 Bad Request", "other");
        check("501 Not Implemented", "other");
    }
}
