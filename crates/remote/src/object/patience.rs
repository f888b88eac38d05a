//! How long one request to an object store may take, and its answer.
//!
//! The client gives no sign of how much of a request has been sent, so a request has the time that its bytes take at
//! [`RATE_MIN`] besides that for an answer: a limit on silence alone, which is what the client has, would be one on the
//! link's speed. The bytes of an answer are seen as they come, so they have both limits: silence, and a pace
//! ([`Pace`]). An answer that carries no object may come as slowly as servers are known to give theirs: one that
//! puts parts together sends a blank now and then (`CompleteMultipartUpload` in the API reference of S3).

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http_body::{Body, Frame, SizeHint};
use object_store::client::{
    HttpClient, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
};
use tokio::time::{Sleep, sleep, timeout};

use super::READ_MAX;
use crate::pace::{Pace, RATE_MIN};

/// For the parts of an answer that carries no object, beside what its bytes take.
const CONFIRMING_MAX: Duration = Duration::from_secs(300);

/// The same client, with limits.
pub(super) fn limit(client: HttpClient) -> HttpClient {
    HttpClient::new(Patient(client))
}

/// How long a request of so many bytes may take, until its answer begins.
fn time_for(bytes: u64) -> Duration {
    READ_MAX + Duration::from_millis(bytes.saturating_mul(1000) / RATE_MIN)
}

#[derive(Debug)]
struct Patient(HttpClient);

impl HttpService for Patient {
    fn call<'life0, 'async_trait>(
        &'life0 self, request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'async_trait>>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(async move {
            let may_take = time_for(request.body().content_length() as u64);
            let grace = if request.method() == "GET" { READ_MAX } else { CONFIRMING_MAX };
            let outcome = timeout(may_take, self.0.execute(request)).await;
            let response = outcome.unwrap_or_else(|_| Err(silent(may_take)))?;
            Ok(response.map(|body| HttpResponseBody::new(Arriving::new(body, grace, READ_MAX))))
        })
    }
}

/// The bytes of an answer on their way.
struct Arriving {
    bytes: HttpResponseBody,
    pace: Pace,
    silence_max: Duration,
    /// Since when the next ones have been waited for, and the end of that.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl Arriving {
    fn new(bytes: HttpResponseBody, grace: Duration, silence_max: Duration) -> Arriving {
        Arriving { bytes, pace: Pace::new(grace), silence_max, waiting: None }
    }
}

impl Body for Arriving {
    type Data = <HttpResponseBody as Body>::Data;
    type Error = HttpError;

    fn poll_frame(
        self: Pin<&mut Self>, context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, HttpError>>> {
        let this = self.get_mut();
        let Poll::Ready(frame) = Pin::new(&mut this.bytes).poll_frame(context) else {
            let silence_max = this.silence_max;
            let (_, end) =
                this.waiting.get_or_insert_with(|| (Instant::now(), Box::pin(sleep(silence_max))));
            return end.as_mut().poll(context).map(|()| Some(Err(silent(silence_max))));
        };
        let waited = this.waiting.take().map_or(Duration::ZERO, |(since, _)| since.elapsed());
        let came = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref());
        if let Some(bytes) = came
            && let Err(why) = this.pace.step(bytes.len() as u64, waited)
        {
            return Poll::Ready(Some(Err(HttpError::new(HttpErrorKind::Timeout, TooSlow(why)))));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.bytes.size_hint()
    }
}

/// An answer came, but too slowly: the remote is there.
#[derive(Debug)]
pub(super) struct TooSlow(pub(super) String);

impl fmt::Display for TooSlow {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for TooSlow {}

fn silent(waited: Duration) -> HttpError {
    let why = format!("no answer within {:.0} s", waited.as_secs_f32());
    HttpError::new(HttpErrorKind::Timeout, std::io::Error::new(std::io::ErrorKind::TimedOut, why))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_request_has_the_time_that_its_bytes_take_on_a_slow_link() {
        assert_eq!(time_for(0), READ_MAX);
        assert_eq!(time_for(RATE_MIN), READ_MAX + SECOND);
        assert_eq!(time_for(4 << 20), READ_MAX + 256 * SECOND);
    }

    /// Gives one part after each pause, and nothing more when there are none.
    struct Parts(VecDeque<(Duration, usize)>, Option<Pin<Box<Sleep>>>);

    impl Body for Parts {
        type Data = <HttpResponseBody as Body>::Data;
        type Error = HttpError;

        fn poll_frame(
            mut self: Pin<&mut Self>, context: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Self::Data>, HttpError>>> {
            let Some(&(pause, bytes)) = self.0.front() else { return Poll::Ready(None) };
            let pause = self.1.get_or_insert_with(|| Box::pin(sleep(pause)));
            if pause.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            self.1 = None;
            self.0.pop_front();
            Poll::Ready(Some(Ok(Frame::data(vec![7; bytes].into()))))
        }
    }

    const LONG: Duration = Duration::from_secs(60);
    const MOMENT: Duration = Duration::from_millis(20);

    /// What becomes of so many parts of so many bytes, each after a pause.
    fn receive(
        (parts, bytes, pause): (usize, usize, Duration), grace: Duration, silence_max: Duration,
    ) -> Result<usize, String> {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_time().build().unwrap();
        let parts = Parts(vec![(pause, bytes); parts].into(), None);
        let arriving = Arriving::new(HttpResponseBody::new(parts), grace, silence_max);
        let outcome = runtime.block_on(HttpResponseBody::new(arriving).bytes());
        outcome.map(|bytes| bytes.len()).map_err(|error| error.to_string())
    }

    #[test]
    fn silence_ends_an_answer_and_so_does_a_byte_now_and_then() {
        assert_eq!(receive((3, 5, Duration::ZERO), MOMENT, LONG), Ok(15));
        assert_eq!(receive((5, 1 << 20, MOMENT), MOMENT, LONG), Ok(5 << 20));
        assert_eq!(receive((5, 1, MOMENT), LONG, LONG), Ok(5), "no object: blanks are allowed");
        let line = receive((1, 1, LONG), LONG, MOMENT).unwrap_err();
        assert!(line.contains("no answer within 0 s"), "{line}");
        let line = receive((1000, 1, MOMENT), MOMENT * 3, LONG).unwrap_err();
        assert!(line.contains("which is slower than 16 KiB/s"), "{line}");
    }
}
