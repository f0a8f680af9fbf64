//! What a response is to say of how its request was let through.

use http::Response;

use super::{
    afterwards::{Afterwards, Done, Work},
    headers::Figures,
    rejection::Degraded,
};
use crate::store::Store;

/// What a response is to say of how its request was let through, and what is to be done before.
pub(super) struct Note<S, R> {
    pub(super) figures: Option<Figures>,
    pub(super) degraded: Option<Degraded>,
    pub(super) afterwards: Option<Box<Afterwards<S, R>>>,
}

/// How far a response has come.
pub(super) enum Progress<S, R, B> {
    Done(Response<B>),
    Waits { work: Work, answer: (Response<B>, Note<S, R>) },
}

impl<S: Store, R> Note<S, R> {
    /// Writes the response, or begins what has to be done before.
    pub(super) fn conclude<B>(self, response: Response<B>) -> Progress<S, R, B> {
        let (response, work) = match &self.afterwards {
            Some(afterwards) => afterwards.begin(response),
            None => (response, None),
        };
        match work {
            Some(work) => Progress::Waits { work, answer: (response, self) },
            None => Progress::Done(self.write(response)),
        }
    }

    /// Writes the response, now that what had to be done is done.
    pub(super) fn concluded<B>(mut self, done: Done, response: Response<B>) -> Response<B> {
        if let Some(figures) = self.afterwards.as_ref().and_then(|afterwards| afterwards.end(done)) {
            self.figures = Some(figures);
        }
        self.write(response)
    }

    fn write<B>(self, mut response: Response<B>) -> Response<B> {
        if let Some(figures) = self.figures {
            figures.write(response.headers_mut());
        }
        if let Some(degraded) = self.degraded {
            response.extensions_mut().insert(degraded);
        }
        if let Some(afterwards) = self.afterwards {
            afterwards.write(&mut response);
        }
        response
    }
}
