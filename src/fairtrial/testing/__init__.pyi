from fairtrial.testing.assertions import assert_eval as assert_eval, eval_test as eval_test
from fairtrial.testing.cases import eval_cases as eval_cases
from fairtrial.testing.environments import check_environment as check_environment
from fairtrial.testing.environments import FakeClock as FakeClock, session_of as session_of

__all__: list[str]
