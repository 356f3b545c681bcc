import { useEffect, useRef, useState } from "react";

import { Failure } from "./api";

export type Answer<T> = { data?: T; failure?: Failure };

/**
 * Asks again and again while the page is visible. What was known stays while an answer fails.
 *
 * @param question changes when something else is asked.
 * @param pause milliseconds between an answer and the next question; depends on the answer.
 */
export const useAnswer = <T>(
  question: string,
  ask: () => Promise<T>,
  pause: (data?: T) => number = () => 5000,
): Answer<T> => {
  const [answer, setAnswer] = useState<Answer<T> & { question: string }>({ question });
  const latest = useRef(ask);
  latest.current = ask;
  const wait = useRef(pause);
  wait.current = pause;
  useEffect(() => {
    let ended = false;
    let timer: ReturnType<typeof setTimeout> | undefined;
    const again = async () => {
      let next: Answer<T> = {};
      if (!document.hidden) {
        try {
          next = { data: await latest.current() };
        } catch (error) {
          next = { failure: error instanceof Failure ? error : new Failure(0, String(error)) };
        }
        if (ended) return;
        setAnswer((before) => ({
          question,
          data: next.data ?? (before.question === question ? before.data : undefined),
          failure: next.failure,
        }));
      }
      if (!ended) timer = setTimeout(() => void again(), wait.current(next.data));
    };
    void again();
    return () => {
      ended = true;
      clearTimeout(timer);
    };
  }, [question]);
  return answer.question === question ? answer : {};
};
