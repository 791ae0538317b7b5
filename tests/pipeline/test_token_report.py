from latentcache.pipeline.token_report import SilentTokens, TokenProgress, token_plan, with_work
from latentcache.pipeline.token_settings import TokenSettings
from latentcache.token_recipe import TokenRecipe

RECIPE = TokenRecipe(tokenizer="ab" * 16, num_ids=300)


def test_a_plan_says_what_it_will_take(tmp_path):
    settings = TokenSettings(data=tmp_path, out=tmp_path / "not" / "there", tokenizer="stub")
    plan = token_plan(settings, RECIPE, samples=3, refused=(), notes=())
    assert (plan.samples, plan.todo, plan.workers, plan.bytes_to_write) == (3, 0, 0, 0)
    assert plan.free_bytes > 0
    more = with_work(plan, 2, 3000, 4)
    assert (more.todo, more.workers, more.bytes_to_write) == (2, 4, 2200)
    assert with_work(plan, 0, 0, 4).workers == 0
    assert with_work(plan, 2, 3000, None).workers == 0


def test_nobody_need_listen(tmp_path):
    silent = SilentTokens()
    silent.planned(token_plan(TokenSettings(data=tmp_path, out=tmp_path), RECIPE, samples=0, refused=(), notes=()))
    silent.advanced(TokenProgress())
    silent.warned("x")
