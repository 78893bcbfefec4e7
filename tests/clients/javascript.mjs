// What clients in JavaScript ask for: the AI SDK (its default, Responses, chats, and Anthropic's form) and openai.
//
//     npm install ai @ai-sdk/openai @ai-sdk/anthropic openai zod
//     node javascript.mjs URL [GROUP]         // see docs/clients.md
//
// Forms and calls are forced, so that each case must be right whatever the model; "a call and its result" asks for a
// chat template that knows `role: tool`. Greedy, so that two runs say the same. A line per case, then how many were
// right; the exit status is 1 if one was not.

import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { Output, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from 'ai'
import OpenAI from 'openai'
import { zodResponseFormat, zodTextFormat, zodFunction, zodResponsesFunction } from 'openai/helpers/zod'
import { z } from 'zod'

const person = z.object({
  name: z.string().regex(/^[A-Z][a-z]{1,10}$/),
  age: z.number().int().min(0).max(120),
  kind: z.enum(['adult', 'child']),
})
const formats = z.object({ day: z.iso.date(), id: z.uuid() })
const tuple = z.object({ pair: z.tuple([z.literal(1), z.boolean()]) }) // openai refuses these itself
const question = 'Ann is 30 years old. Who is she?'
const base = `${process.argv[2]}/v1`
const list = await (await fetch(`${base}/models`)).json()
const model = list.data[0].id

const check = (holds) => {
  if (!holds) throw new Error('not what was asked for')
}
const onError = ({ error }) => {
  throw error
}

function sdkCases(chosen) {
  const asked = { model: chosen, prompt: question, maxOutputTokens: 400, temperature: 0, maxRetries: 0 }
  // Else calls may fill all its tokens.
  const one = {
    providerOptions: { openai: { parallelToolCalls: false }, anthropic: { disableParallelToolUse: true } },
  }
  const place = z.object({ place: z.enum(['Bern', 'Basel']) })
  const weather = tool({ description: 'of a place', inputSchema: place, execute: async () => ({ sky: 'dry' }) })
  const twice = {
    tools: { weather },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' }),
    stopWhen: stepCountIs(2),
    ...one,
  }
  return {
    generateText: async () => check((await generateText({ ...asked, maxOutputTokens: 20 })).text),
    'generateText, messages': async () => {
      const messages = [
        { role: 'user', content: 'Hi' },
        { role: 'assistant', content: 'Hello!' },
        { role: 'user', content: [{ type: 'text', text: question }] },
      ]
      const chat = { ...asked, prompt: undefined, system: 'Be brief.', messages, maxOutputTokens: 20 }
      check((await generateText(chat)).text)
    },
    streamText: async () => {
      const reply = streamText({ ...asked, maxOutputTokens: 20, onError })
      let text = ''
      for await (const part of reply.textStream) text += part
      const usage = await reply.usage
      check(text && usage.inputTokens > 0 && usage.outputTokens > 0)
    },
    generateObject: async () => person.parse((await generateObject({ ...asked, schema: person })).object),
    'generateObject, formats': async () => formats.parse((await generateObject({ ...asked, schema: formats })).object),
    'generateObject, tuple': async () => tuple.parse((await generateObject({ ...asked, schema: tuple })).object),
    'generateObject, enum': async () => {
      const { object } = await generateObject({ ...asked, output: 'enum', enum: ['yes', 'no'] })
      check(['yes', 'no'].includes(object))
    },
    streamObject: async () => {
      const reply = streamObject({ ...asked, schema: person, onError })
      for await (const part of reply.partialObjectStream) check(part)
      person.parse(await reply.object)
    },
    'Output.object': async () => {
      person.parse((await generateText({ ...asked, output: Output.object({ schema: person }) })).output)
    },
    'a required call': async () => {
      const reply = await generateText({ ...asked, ...one, tools: { weather }, toolChoice: 'required' })
      check(reply.toolCalls[0].toolName === 'weather' && reply.toolResults[0].output.sky === 'dry')
    },
    'a named call, streamed': async () => {
      const toolChoice = { type: 'tool', toolName: 'weather' }
      const seen = []
      for await (const part of streamText({ ...asked, tools: { weather }, toolChoice, onError }).fullStream) {
        seen.push(part.type)
      }
      check(['tool-input-delta', 'tool-call', 'tool-result'].every((type) => seen.includes(type)))
    },
    'a call and its result': async () => {
      const reply = await generateText({ ...asked, ...twice, maxOutputTokens: 100 })
      check(reply.steps.length === 2 && reply.steps[0].toolCalls.length > 0 && reply.text)
    },
    'a call and its result, streamed': async () => {
      const reply = streamText({ ...asked, ...twice, maxOutputTokens: 100, onError })
      let text = ''
      for await (const part of reply.textStream) text += part
      check((await reply.steps).length === 2 && text)
    },
  }
}

function openaiCases() {
  const client = new OpenAI({ baseURL: base, apiKey: 'none', maxRetries: 0 })
  const messages = [{ role: 'user', content: question }]
  const chat = { model, messages, max_tokens: 400, temperature: 0 }
  const item = { model, input: question, max_output_tokens: 400, temperature: 0 }
  const named = { name: 'person', parameters: person }
  return {
    'chat.completions.create, streamed': async () => {
      const stream = await client.chat.completions.create({ ...chat, max_tokens: 20, stream: true })
      let text = ''
      for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? ''
      check(text)
    },
    'chat.completions.parse': async () => {
      const response_format = zodResponseFormat(person, 'person')
      const reply = await client.chat.completions.parse({ ...chat, response_format })
      person.parse(reply.choices[0].message.parsed)
    },
    'chat.completions.stream': async () => {
      const stream = client.chat.completions.stream({ ...chat, response_format: zodResponseFormat(formats, 'formats') })
      formats.parse((await stream.finalChatCompletion()).choices[0].message.parsed)
    },
    'chat.completions.parse, zodFunction': async () => {
      const tools = [zodFunction(named)]
      const reply = await client.chat.completions.parse({ ...chat, tools, tool_choice: 'required' })
      person.parse(reply.choices[0].message.tool_calls[0].function.parsed_arguments)
    },
    'chat.completions.runTools': async () => {
      let found
      const run = { ...named, function: (value) => (found = value), parse: (text) => person.parse(JSON.parse(text)) }
      const parameters = z.toJSONSchema(person)
      const runner = client.chat.completions.runTools(
        {
          ...chat,
          tools: [{ type: 'function', function: { ...run, description: 'somebody', parameters } }],
          tool_choice: { type: 'function', function: { name: 'person' } },
        },
        { maxChatCompletions: 1 },
      )
      await runner.done().catch(() => {})
      person.parse(found)
    },
    'responses.parse': async () => {
      const text = { format: zodTextFormat(person, 'p') }
      person.parse((await client.responses.parse({ ...item, text })).output_parsed)
    },
    'responses.stream': async () => {
      const stream = client.responses.stream({ ...item, text: { format: zodTextFormat(person, 'p') } })
      for await (const event of stream) check(event.type)
      person.parse((await stream.finalResponse()).output_parsed)
    },
    'responses.parse, zodResponsesFunction': async () => {
      const tools = [zodResponsesFunction(named)]
      const reply = await client.responses.parse({ ...item, tools, tool_choice: 'required' })
      person.parse(reply.output[0].parsed_arguments)
    },
  }
}

const provider = createOpenAI({ baseURL: base, apiKey: 'none' })
const anthropic = createAnthropic({ baseURL: base, apiKey: 'none' })
const all = {
  'ai, Responses': sdkCases(provider(model)),
  'ai, chats': sdkCases(provider.chat(model)),
  'ai, Anthropic': sdkCases(anthropic(model)),
  openai: openaiCases(),
}
const groups = Object.fromEntries(Object.entries(all).filter(([name]) => name.includes(process.argv[3] ?? '')))
let wrong = 0
for (const [client, cases] of Object.entries(groups)) {
  console.log(client)
  for (const [name, run] of Object.entries(cases)) {
    try {
      await run()
      console.log(`  ${name}: right`)
    } catch (error) {
      wrong += 1
      console.log(`  ${name}: FAILED: ${String(error).slice(0, 300)} ${String(error.responseBody ?? '').slice(0, 300)}`)
    }
  }
}
const count = Object.values(groups).reduce((sum, cases) => sum + Object.keys(cases).length, 0)
console.log(`${count - wrong} of ${count} right`)
process.exit(wrong > 0 ? 1 : 0)
