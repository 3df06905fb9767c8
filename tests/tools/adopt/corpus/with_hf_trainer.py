from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from my_data import train_set

model = AutoModelForCausalLM.from_pretrained("gpt2")
trainer = Trainer(model, TrainingArguments("out"), train_dataset=train_set)
trainer.train(resume_from_checkpoint=True)
