from asyncgrpo_agent.core.about_run import settings_shown


def test_numbers_are_kept_and_of_texts_only_ways() -> None:
    given = {
        "learning_rate": 1e-5,
        "bf16": True,
        "loss_type": "grpo",
        "hub_token": "hf_secret",
        "output_dir": "/home/me",
        "chat_template_kwargs": {"a": 1},
    }
    lora = {"r": 16, "target_modules": ["v_proj", "q_proj"], "modules_to_save": ["x"]}
    shown = settings_shown(given, lora, {"trainer.quorum": 0.5})
    assert shown == {
        "bf16": True,
        "learning_rate": 1e-5,
        "lora.r": 16,
        "lora.target_modules": "q_proj, v_proj",
        "loss_type": "grpo",
        "trainer.quorum": 0.5,
    }
    assert list(shown) == sorted(shown)
